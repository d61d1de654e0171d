#include "tranche/kernels/cross_entropy.h"

#include <fmt/core.h>

#include "kernels/check.h"
#include "kernels/cpu/cross_entropy.h"
#include "kernels/cuda/cross_entropy.h"
#include "kernels/dispatch.h"
#include "kernels/meta/cross_entropy_cost.h"

namespace tranche::kernels {

namespace {

/// Checks the state against `rows` and fills in the members that the calls have in common.
cpu::CrossEntropyCall checked_call(std::string_view kernel, const Stream& stream,
                                   const CrossEntropyState& state, std::int64_t rows) {
  check_tensor(kernel, "state.maximum", state.maximum, {DataType::float32}, rows);
  check_tensor(kernel, "state.sum", state.sum, {DataType::float32}, rows);
  check_tensor(kernel, "state.target_logit", state.target_logit, {DataType::float32}, rows);
  return {.rows = rows,
          .maximum = state.maximum.as<float>(),
          .sum = state.sum.as<float>(),
          .target_logit = state.target_logit.as<float>(),
          .threads = stream.threads()};
}

void add_targets(std::string_view kernel, const ConstTensorView& targets, cpu::CrossEntropyCall& call) {
  check_tensor(kernel, "targets", targets, {DataType::int32}, call.rows);
  call.targets = targets.as<std::int32_t>();
}

void add_logits(std::string_view kernel, const ConstTensorView& logits, std::int64_t first_column,
                cpu::CrossEntropyCall& call) {
  if (first_column < 0) refuse(kernel, fmt::format("first_column is {}, wanted 0 or more", first_column));
  call.columns = logits.shape[1];
  call.first_column = first_column;
  call.logits = logits.as<float>();
}

}  // namespace

void cross_entropy_begin(Stream& stream, const CrossEntropyState& state) {
  constexpr std::string_view kernel = "cross_entropy_begin";
  const cpu::CrossEntropyCall call = checked_call(kernel, stream, state, state.maximum.elements());
  dispatch(
      stream, kernel, meta::cross_entropy_begin_cost(call.rows), [call] { cpu::cross_entropy_begin(call); },
      [&] { cuda::cross_entropy_begin(stream, state); });
}

void cross_entropy_accumulate(Stream& stream, const ConstTensorView& logits, const ConstTensorView& targets,
                              std::int64_t first_column, const CrossEntropyState& state) {
  constexpr std::string_view kernel = "cross_entropy_accumulate";
  check_dtype(kernel, "logits", logits.dtype, {DataType::float32});
  check_rank(kernel, "logits", logits.shape, 2);
  cpu::CrossEntropyCall call = checked_call(kernel, stream, state, logits.shape[0]);
  add_targets(kernel, targets, call);
  add_logits(kernel, logits, first_column, call);
  dispatch(
      stream, kernel, meta::cross_entropy_accumulate_cost(call.rows, call.columns),
      [call] { cpu::cross_entropy_accumulate(call); },
      [&] { cuda::cross_entropy_accumulate(stream, logits, targets, first_column, state); });
}

void cross_entropy_combine(Stream& stream, const ConstTensorView& states, const CrossEntropyState& state) {
  constexpr std::string_view kernel = "cross_entropy_combine";
  cpu::CrossEntropyCall call = checked_call(kernel, stream, state, state.maximum.elements());
  check_dtype(kernel, "states", states.dtype, {DataType::float32});
  check_rank(kernel, "states", states.shape, 3);
  check_shape(kernel, "states", states.shape, {states.shape[0], 3, call.rows});
  call.ranks = states.shape[0];
  call.states = states.as<float>();
  dispatch(
      stream, kernel, meta::cross_entropy_combine_cost(call.rows, call.ranks),
      [call] { cpu::cross_entropy_combine(call); },
      [&] { cuda::cross_entropy_combine(stream, states, state); });
}

void cross_entropy_finish(Stream& stream, const ConstTensorView& targets, const CrossEntropyState& state,
                          const TensorView& loss_sum, const TensorView& token_count) {
  constexpr std::string_view kernel = "cross_entropy_finish";
  cpu::CrossEntropyCall call = checked_call(kernel, stream, state, state.maximum.elements());
  add_targets(kernel, targets, call);
  check_tensor(kernel, "loss_sum", loss_sum, {DataType::float64}, 1);
  check_tensor(kernel, "token_count", token_count, {DataType::int64}, 1);
  call.loss_sum = loss_sum.as<double>();
  call.token_count = token_count.as<std::int64_t>();
  dispatch(
      stream, kernel, meta::cross_entropy_finish_cost(call.rows), [call] { cpu::cross_entropy_finish(call); },
      [&] { cuda::cross_entropy_finish(stream, targets, state, loss_sum, token_count); });
}

void cross_entropy_gradient(Stream& stream, const ConstTensorView& logits, const ConstTensorView& targets,
                            std::int64_t first_column, const CrossEntropyState& state, float scale,
                            const TensorView& d_logits) {
  constexpr std::string_view kernel = "cross_entropy_gradient";
  check_dtype(kernel, "logits", logits.dtype, {DataType::float32});
  check_rank(kernel, "logits", logits.shape, 2);
  check_floating(kernel, "d_logits", d_logits.dtype);
  check_shape(kernel, "d_logits", d_logits.shape, logits.shape);
  cpu::CrossEntropyCall call = checked_call(kernel, stream, state, logits.shape[0]);
  add_targets(kernel, targets, call);
  add_logits(kernel, logits, first_column, call);
  call.scale = scale;
  call.d_logits = d_logits.data;
  call.gradient_dtype = d_logits.dtype;
  dispatch(
      stream, kernel, meta::cross_entropy_gradient_cost(call.rows, call.columns, d_logits.dtype),
      [call] { cpu::cross_entropy_gradient(call); },
      [&] { cuda::cross_entropy_gradient(stream, logits, targets, first_column, state, scale, d_logits); });
}

}  // namespace tranche::kernels
