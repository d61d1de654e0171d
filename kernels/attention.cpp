#include "tranche/kernels/attention.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels/attention_operands.h"
#include "kernels/check.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/attention_bf16.h"
#include "kernels/cpu/convert.h"
#include "kernels/cuda/attention.h"
#include "kernels/dispatch.h"
#include "kernels/meta/attention_cost.h"

namespace tranche::kernels {

namespace {

/// The number of tokens of each batch entry in rows of keys, [batch, tokens, n] or [batch * tokens, n].
std::int64_t tokens_of(const Shape& shape, std::int64_t batch) {
  if (shape.rank() == 3) return shape[1];
  return batch > 0 && shape.rank() == 2 ? shape[0] / batch : 0;
}

/// Checks that `operand` has rows for `tokens` tokens of every batch entry, with `heads` heads from its first
/// column on.
template <class Held>
auto checked_rows(std::string_view kernel, std::string_view operand, const Held& held,
                  const AttentionOperands& of, std::int64_t tokens, std::int64_t heads) {
  check_dtype(kernel, operand, held.rows.dtype, {of.dtype});
  const Shape& shape = held.rows.shape;
  const bool by_token = shape.rank() == 2 && shape[0] == of.batch * tokens;
  if (!by_token && !(shape.rank() == 3 && shape[0] == of.batch && shape[1] == tokens)) {
    refuse(kernel, fmt::format("`{}` has shape {}, wanted [{}, {}, n] or [{}, n]", operand, shape.to_string(),
                               of.batch, tokens, of.batch * tokens));
  }
  const std::int64_t stride = shape[shape.rank() - 1];
  if (held.first_column < 0 || held.first_column + heads * of.head_width > stride) {
    refuse(kernel,
           fmt::format("`{}` has rows of {} elements, which do not hold {} heads of {} from column {}",
                       operand, stride, heads, of.head_width, held.first_column));
  }
  // A tensor on meta has no address, so none is computed.
  auto* const data = held.rows.data == nullptr ? held.rows.data
                                               : cpu::element_at(of.dtype, held.rows.data, held.first_column);
  return HeadRows<std::remove_pointer_t<decltype(data)>>{data, stride};
}

/// Checks the operands that forward and backward have in common. `out` is named in errors as given.
cpu::AttentionCall checked_call(std::string_view kernel, const Stream& stream,
                                const AttentionOptions& options, const ConstHeads& query,
                                const ConstHeads& key, const ConstHeads& value, const ConstTensorView& out,
                                const ConstTensorView& log_sum_exp, const Workspace& workspace) {
  check_floating(kernel, "query", query.rows.dtype);
  check_dtype(kernel, "out", out.dtype, {query.rows.dtype});
  check_dtype(kernel, "log_sum_exp", log_sum_exp.dtype, {DataType::float32});
  check_rank(kernel, "out", out.shape, 3);
  cpu::AttentionCall call;
  call.batch = out.shape[0];
  call.queries = out.shape[1];
  call.first_query = options.first_query;
  // The number of keys may differ from that of the queries only if first_query is set.
  const std::int64_t tokens = tokens_of(key.rows.shape, call.batch);
  call.time = call.first_query == 0 && tokens < call.queries ? call.queries : tokens;
  if (call.first_query < 0 || call.end_query() > call.time || (call.queries == 0 && call.time > 0)) {
    refuse(kernel, fmt::format("queries [{}, {}) are not among {} tokens, which `key` has", call.first_query,
                               call.end_query(), call.time));
  }
  call.heads = options.heads;
  call.dtype = out.dtype;
  if (call.heads < 1 || out.shape[2] % call.heads != 0) {
    refuse(kernel, fmt::format("{} heads do not divide the width {}", call.heads, out.shape[2]));
  }
  call.head_width = out.shape[2] / call.heads;
  call.key_value_heads = options.key_value_heads == 0 ? call.heads : options.key_value_heads;
  if (call.key_value_heads < 1 || call.heads % call.key_value_heads != 0) {
    refuse(kernel,
           fmt::format("{} key_value_heads do not divide the {} heads", call.key_value_heads, call.heads));
  }
  if (options.window < 0) refuse(kernel, fmt::format("window is {}, wanted 0 or more", options.window));
  call.window = options.window;
  if (options.first_head < 0) {
    refuse(kernel, fmt::format("first_head is {}, wanted 0 or more", options.first_head));
  }
  call.first_head = options.first_head;
  if (!(options.scale >= 0.0f && std::isfinite(options.scale))) {
    refuse(kernel, fmt::format("scale is {}, wanted a positive number or 0", options.scale));
  }
  call.scale = options.scale > 0 ? options.scale : 1.0f / std::sqrt(static_cast<float>(call.head_width));
  call.parts = {checked_rows(kernel, "query", query, call, call.queries, call.heads),
                checked_rows(kernel, "key", key, call, call.time, call.key_value_heads),
                checked_rows(kernel, "value", value, call, call.time, call.key_value_heads)};
  check_shape(kernel, "log_sum_exp", log_sum_exp.shape, {call.batch, call.heads, call.queries});
  if (options.document_begin.shape.rank() > 0) {
    check_dtype(kernel, "document_begin", options.document_begin.dtype, {DataType::int32});
    check_shape(kernel, "document_begin", options.document_begin.shape, {call.batch, call.time});
    call.document_begin = options.document_begin.as<std::int32_t>();
  }
  const std::int64_t scratch = attention_workspace_bytes(call.head_width, call.time);
  if (workspace.bytes < scratch) {
    refuse(kernel, fmt::format("workspace has {} bytes; heads of width {} need at least {}", workspace.bytes,
                               call.head_width, scratch));
  }
  const DropoutOptions& dropout = options.dropout;
  if (!(dropout.probability >= 0.0f && dropout.probability < 1.0f)) {
    refuse(kernel, fmt::format("dropout probability is {}, wanted [0, 1)", dropout.probability));
  }
  if (dropout.first_element != 0 || dropout.sample_elements != 0) {
    refuse(kernel, "dropout names a part of the samples, which only the kernel dropout takes");
  }
  if (dropout.probability > 0.0f) {
    if (static_cast<std::int64_t>(dropout.samples.size()) != call.batch) {
      refuse(kernel, fmt::format("dropout names {} samples, wanted {} (one for each batch entry)",
                                 dropout.samples.size(), call.batch));
    }
    call.dropout.emplace(dropout);
    call.samples.assign(dropout.samples.begin(), dropout.samples.end());
  }
  call.workspace = workspace;
  call.threads = stream.threads();
  return call;
}

cuda::AttentionCall on_gpu(const cpu::AttentionCall& call, const AttentionOptions& options) {
  const AttentionOperands& operands = call;
  cuda::AttentionCall made{operands, {}};
  if (call.dropout) made.dropout = dropout_draws(options.dropout);
  return made;
}

}  // namespace

std::int64_t attention_workspace_bytes(std::int64_t head_width, std::int64_t time) {
  return std::max(cpu::attention_workspace_bytes(head_width),
                  cuda::attention_workspace_bytes(head_width, time));
}

std::string_view attention_path(DeviceKind device, DataType dtype, std::int64_t head_width, float dropout) {
  switch (device) {
    case DeviceKind::cpu:
      return cpu::attention_runs_in_bf16(dtype, head_width) ? "tiles in bf16, sums in fp32" : "tiles in fp32";
    case DeviceKind::meta:
      return "counted, not computed";
    case DeviceKind::cuda:
      break;
  }
  return with_cuda([&] { return name_of(cuda::choose_attention(dtype, head_width, dropout > 0.0f, true)); });
}

void attention_forward(Stream& stream, const AttentionOptions& options, const ConstHeads& query,
                       const ConstHeads& key, const ConstHeads& value, const TensorView& out,
                       const TensorView& log_sum_exp, const Workspace& workspace) {
  constexpr std::string_view kernel = "attention_forward";
  cpu::AttentionCall call =
      checked_call(kernel, stream, options, query, key, value, out, log_sum_exp, workspace);
  call.out = out.data;
  call.log_sum_exp = log_sum_exp.as<float>();
  dispatch(
      stream, kernel, meta::attention_forward_cost(call), [call] { cpu::attention_forward(call); },
      [&] { cuda::attention_forward(stream, on_gpu(call, options), workspace); });
}

void attention_backward(Stream& stream, const AttentionOptions& options, const ConstTensorView& d_out,
                        const ConstHeads& query, const ConstHeads& key, const ConstHeads& value,
                        const ConstTensorView& out, const ConstTensorView& log_sum_exp, const Heads& d_query,
                        const Heads& d_key, const Heads& d_value, const Workspace& workspace) {
  constexpr std::string_view kernel = "attention_backward";
  cpu::AttentionCall call =
      checked_call(kernel, stream, options, query, key, value, out, log_sum_exp, workspace);
  check_dtype(kernel, "d_out", d_out.dtype, {call.dtype});
  check_shape(kernel, "d_out", d_out.shape, out.shape);
  call.d_parts = {checked_rows(kernel, "d_query", d_query, call, call.queries, call.heads),
                  checked_rows(kernel, "d_key", d_key, call, call.time, call.key_value_heads),
                  checked_rows(kernel, "d_value", d_value, call, call.time, call.key_value_heads)};
  // One description serves both directions; backward only reads these two members.
  call.out = const_cast<void*>(out.data);
  call.log_sum_exp = const_cast<float*>(log_sum_exp.as<float>());
  call.d_out = d_out.data;
  dispatch(
      stream, kernel, meta::attention_backward_cost(call), [call] { cpu::attention_backward(call); },
      [&] { cuda::attention_backward(stream, on_gpu(call, options), workspace); });
}

}  // namespace tranche::kernels
