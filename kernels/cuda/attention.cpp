#include "kernels/cuda/attention.h"

#include <cstdint>

namespace tranche::kernels::cuda {

namespace {

bool aligned(const void* data, std::int64_t row_bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && row_bytes % 16 == 0;
}

AttentionPath path_of(const AttentionCall& call) {
  const std::int64_t bytes = size_of(call.dtype);
  bool rows_fit = aligned(call.out, 0) && aligned(call.d_out, 0);
  for (const auto& part : call.parts) rows_fit = rows_fit && aligned(part.data, part.stride * bytes);
  for (const auto& part : call.d_parts) rows_fit = rows_fit && aligned(part.data, part.stride * bytes);
  rows_fit = rows_fit && call.parts[1].stride == call.parts[2].stride;
  return choose_attention(call.dtype, call.head_width, call.dropout.has_value(), rows_fit);
}

bool empty(const AttentionCall& call) {
  return call.batch == 0 || call.time == 0 || call.width() == 0;
}

}  // namespace

std::string_view name_of(AttentionPath path) {
  return path == AttentionPath::flash ? "flash attention on tensor cores" : "cuBLASLt GEMMs and softmax";
}

void attention_forward(Stream& stream, const AttentionCall& call, const Workspace& workspace) {
  if (empty(call)) return;
  if (path_of(call) == AttentionPath::flash) return flash_forward(stream, call);
  gemm_attention_forward(stream, call, workspace);
}

void attention_backward(Stream& stream, const AttentionCall& call, const Workspace& workspace) {
  if (empty(call)) return;
  // The statistics of a group of heads that share a key must fit.
  const bool fits = flash_heads(call.queries, call.group(), workspace.bytes) > 0;
  if (fits && path_of(call) == AttentionPath::flash) return flash_backward(stream, call, workspace);
  gemm_attention_backward(stream, call, workspace);
}

}  // namespace tranche::kernels::cuda
