#include "tranche/kernels/embedding.h"

#include <fmt/core.h>

#include "kernels/check.h"
#include "kernels/cpu/embedding.h"
#include "kernels/cuda/embedding.h"
#include "kernels/dispatch.h"
#include "kernels/meta/embedding_cost.h"

namespace tranche::kernels {

namespace {

struct Sizes {
  std::int64_t batch, time, width;
};

/// Checks tokens and the two tables (or their gradients; positions are optional) against `rows_name`, [batch,
/// time, width] or [batch * time, width].
Sizes check_sizes(std::string_view kernel, const ConstTensorView& tokens, std::string_view token_name,
                  const ConstTensorView& token_table, std::string_view position_name,
                  const ConstTensorView& position_table, std::string_view rows_name, std::int64_t elements) {
  check_dtype(kernel, "tokens", tokens.dtype, {DataType::int32});
  check_rank(kernel, "tokens", tokens.shape, 2);
  check_rank(kernel, token_name, token_table.shape, 2);
  const Sizes sizes{tokens.shape[0], tokens.shape[1], token_table.shape[1]};
  if (is_given(position_table)) {
    check_dtype(kernel, position_name, position_table.dtype, {token_table.dtype});
    check_rank(kernel, position_name, position_table.shape, 2);
    check_shape(kernel, position_name, position_table.shape, {position_table.shape[0], sizes.width});
    if (sizes.time > position_table.shape[0]) {
      refuse(kernel, fmt::format("`tokens` has {} positions, `{}` only {}", sizes.time, position_name,
                                 position_table.shape[0]));
    }
  }
  check_elements(kernel, rows_name, elements, tokens.elements() * sizes.width);
  return sizes;
}

/// The tokens of a table; all of them if it has the whole vocabulary.
cpu::TokenRange token_range(std::string_view kernel, const ConstTensorView& table, std::int64_t first_token) {
  if (first_token == whole_vocabulary) return {};
  if (first_token < 0) {
    refuse(kernel, fmt::format("first_token is {}, wanted 0 or more, or whole_vocabulary", first_token));
  }
  return {first_token, table.shape[0]};
}

}  // namespace

void embedding_forward(Stream& stream, const ConstTensorView& tokens, const ConstTensorView& token_table,
                       const ConstTensorView& position_table, const TensorView& out,
                       const ConstTensorView& positions, std::int64_t first_token) {
  constexpr std::string_view kernel = "embedding_forward";
  check_floating(kernel, "out", out.dtype);
  check_dtype(kernel, "token_table", token_table.dtype, {out.dtype});
  const Sizes sizes = check_sizes(kernel, tokens, "token_table", token_table, "position_table",
                                  position_table, "out", out.elements());
  if (is_given(positions)) {
    if (!is_given(position_table)) refuse(kernel, "`positions` are given, but no position_table");
    check_tensor(kernel, "positions", positions, {DataType::int32}, tokens.elements());
  }
  const cpu::EmbeddingForward call{.batch = sizes.batch,
                                   .time = sizes.time,
                                   .width = sizes.width,
                                   .dtype = out.dtype,
                                   .range = token_range(kernel, token_table, first_token),
                                   .tokens = tokens.as<std::int32_t>(),
                                   .token_table = token_table.data,
                                   .position_table = position_table.data,
                                   .positions = is_given(position_table),
                                   .given = static_cast<const std::int32_t*>(positions.data),
                                   .out = out.data,
                                   .threads = stream.threads()};
  dispatch(
      stream, kernel, meta::embedding_forward_cost(tokens.elements(), sizes.width, out.dtype, call.positions),
      [call] { cpu::embedding_forward(call); },
      [&] {
        cuda::embedding_forward(stream, tokens, token_table, position_table, out, positions, first_token);
      });
}

void embedding_backward(Stream& stream, const ConstTensorView& tokens, const ConstTensorView& d_out,
                        const TensorView& token_gradient, const TensorView& position_gradient,
                        std::int64_t first_token) {
  constexpr std::string_view kernel = "embedding_backward";
  check_floating(kernel, "d_out", d_out.dtype);
  check_dtype(kernel, "token_gradient", token_gradient.dtype, {DataType::float32});
  const Sizes sizes = check_sizes(kernel, tokens, "token_gradient", token_gradient, "position_gradient",
                                  position_gradient, "d_out", d_out.elements());
  const cpu::EmbeddingBackward call{.batch = sizes.batch,
                                    .time = sizes.time,
                                    .width = sizes.width,
                                    .dtype = d_out.dtype,
                                    .range = token_range(kernel, token_gradient, first_token),
                                    .tokens = tokens.as<std::int32_t>(),
                                    .d_out = d_out.data,
                                    .token_gradient = token_gradient.as<float>(),
                                    .position_gradient = position_gradient.as<float>(),
                                    .positions = is_given(position_gradient),
                                    .threads = stream.threads()};
  dispatch(
      stream, kernel,
      meta::embedding_backward_cost(tokens.elements(), sizes.width, d_out.dtype, call.positions),
      [call] { cpu::embedding_backward(call); },
      [&] {
        cuda::embedding_backward(stream, tokens, d_out, token_gradient, position_gradient, first_token);
      });
}

}  // namespace tranche::kernels
