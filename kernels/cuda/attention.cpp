#include "kernels/cuda/attention.h"

#include <initializer_list>

namespace tranche::kernels::cuda {

namespace {

AttentionPath path_of(const AttentionCall& call) {
  bool aligned = true;
  for (const void* data : {call.query_key_value, static_cast<const void*>(call.out), call.d_out,
                           static_cast<const void*>(call.d_query_key_value)}) {
    aligned = aligned && reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
  }
  return choose_attention(call.dtype, call.head_width(), call.dropout.has_value(), aligned);
}

bool empty(const AttentionCall& call) {
  return call.batch == 0 || call.time == 0 || call.width == 0;
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
  if (path_of(call) == AttentionPath::flash) return flash_backward(stream, call, workspace);
  gemm_attention_backward(stream, call, workspace);
}

}  // namespace tranche::kernels::cuda
