#include "tranche/kernels/attention.h"

#include <fmt/core.h>

#include <algorithm>

#include "kernels/check.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/attention_bf16.h"
#include "kernels/cuda/attention.h"
#include "kernels/dispatch.h"
#include "kernels/meta/attention_cost.h"

namespace tranche::kernels {

namespace {

/// Checks what forward and backward have in common. `out` is named as given.
cpu::AttentionCall checked_call(std::string_view kernel, const Stream& stream,
                                const AttentionOptions& options, const ConstTensorView& query_key_value,
                                const ConstTensorView& out, const ConstTensorView& log_sum_exp,
                                const Workspace& workspace) {
  check_floating(kernel, "query_key_value", query_key_value.dtype);
  check_dtype(kernel, "out", out.dtype, {query_key_value.dtype});
  check_dtype(kernel, "log_sum_exp", log_sum_exp.dtype, {DataType::float32});
  check_rank(kernel, "query_key_value", query_key_value.shape, 3);
  check_rank(kernel, "out", out.shape, 3);
  cpu::AttentionCall call;
  call.batch = out.shape[0];
  call.time = out.shape[1];
  call.width = out.shape[2];
  call.heads = options.heads;
  call.dtype = out.dtype;
  check_shape(kernel, "query_key_value", query_key_value.shape, {call.batch, call.time, 3 * call.width});
  if (call.heads < 1 || call.width % call.heads != 0) {
    refuse(kernel, fmt::format("{} heads do not divide the width {}", call.heads, call.width));
  }
  check_shape(kernel, "log_sum_exp", log_sum_exp.shape, {call.batch, call.heads, call.time});
  const std::int64_t scratch = attention_workspace_bytes(call.head_width(), call.time);
  if (workspace.bytes < scratch) {
    refuse(kernel, fmt::format("workspace has {} bytes; heads of width {} need at least {}", workspace.bytes,
                               call.head_width(), scratch));
  }
  const DropoutOptions& dropout = options.dropout;
  if (!(dropout.probability >= 0.0f && dropout.probability < 1.0f)) {
    refuse(kernel, fmt::format("dropout probability is {}, wanted [0, 1)", dropout.probability));
  }
  if (dropout.probability > 0.0f) {
    if (static_cast<std::int64_t>(dropout.samples.size()) != call.batch) {
      refuse(kernel, fmt::format("dropout names {} samples, wanted {} (one for each batch entry)",
                                 dropout.samples.size(), call.batch));
    }
    call.dropout.emplace(dropout);
    call.samples.assign(dropout.samples.begin(), dropout.samples.end());
  }
  call.query_key_value = query_key_value.data;
  call.workspace = workspace;
  call.threads = stream.threads();
  return call;
}

cuda::AttentionCall on_gpu(const cpu::AttentionCall& call, const AttentionOptions& options) {
  cuda::AttentionCall made;
  made.batch = call.batch;
  made.time = call.time;
  made.width = call.width;
  made.heads = call.heads;
  made.dtype = call.dtype;
  made.query_key_value = call.query_key_value;
  made.out = call.out;
  made.log_sum_exp = call.log_sum_exp;
  made.d_out = call.d_out;
  made.d_query_key_value = call.d_query_key_value;
  if (call.dropout) made.dropout = dropout_draws(options.dropout);
  made.samples = call.samples;
  return made;
}

}  // namespace

std::int64_t attention_workspace_bytes(std::int64_t head_width, std::int64_t time) {
  return std::max(cpu::attention_workspace_bytes(head_width), cuda::attention_workspace_bytes(time));
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

void attention_forward(Stream& stream, const AttentionOptions& options,
                       const ConstTensorView& query_key_value, const TensorView& out,
                       const TensorView& log_sum_exp, const Workspace& workspace) {
  constexpr std::string_view kernel = "attention_forward";
  cpu::AttentionCall call =
      checked_call(kernel, stream, options, query_key_value, out, log_sum_exp, workspace);
  call.out = out.data;
  call.log_sum_exp = log_sum_exp.as<float>();
  dispatch(
      stream, kernel, meta::attention_forward_cost(call.batch, call.time, call.width, call.heads, call.dtype),
      [call] { cpu::attention_forward(call); },
      [&] { cuda::attention_forward(stream, on_gpu(call, options), workspace); });
}

void attention_backward(Stream& stream, const AttentionOptions& options, const ConstTensorView& d_out,
                        const ConstTensorView& query_key_value, const ConstTensorView& out,
                        const ConstTensorView& log_sum_exp, const TensorView& d_query_key_value,
                        const Workspace& workspace) {
  constexpr std::string_view kernel = "attention_backward";
  cpu::AttentionCall call =
      checked_call(kernel, stream, options, query_key_value, out, log_sum_exp, workspace);
  check_dtype(kernel, "d_out", d_out.dtype, {call.dtype});
  check_dtype(kernel, "d_query_key_value", d_query_key_value.dtype, {call.dtype});
  check_shape(kernel, "d_out", d_out.shape, out.shape);
  check_shape(kernel, "d_query_key_value", d_query_key_value.shape, query_key_value.shape);
  // One description serves both directions; backward only reads these two.
  call.out = const_cast<void*>(out.data);
  call.log_sum_exp = const_cast<float*>(log_sum_exp.as<float>());
  call.d_out = d_out.data;
  call.d_query_key_value = d_query_key_value.data;
  dispatch(
      stream, kernel,
      meta::attention_backward_cost(call.batch, call.time, call.width, call.heads, call.dtype),
      [call] { cpu::attention_backward(call); },
      [&] { cuda::attention_backward(stream, on_gpu(call, options), workspace); });
}

}  // namespace tranche::kernels
