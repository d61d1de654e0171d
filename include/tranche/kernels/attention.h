#pragma once
#include <cstdint>
#include <string_view>

#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/workspace.h"

namespace tranche::kernels {

struct AttentionOptions {
  std::int64_t heads = 1;
  DropoutOptions dropout;  ///< on the probabilities; element index is (head * time + query) * time + key
};

/// Causal self-attention. query_key_value [batch, time, 3 * width] in compute dtype, the three parts side by
/// side as GPT-2 packs them; out [batch, time, width]; log_sum_exp fp32 [batch, heads, time] is saved for
/// backward, the score matrix is not. Scores are scaled by 1 / sqrt(width / heads). Softmax in fp32. cpu:
/// tiles widened to fp32; for bf16 in heads of whole multiples of 32 elements, on CPUs whose bf16 dot
/// products are faster than fp32 (AVX512-BF16 on AMD), bf16 GEMMs with fp32 sums, for which probabilities and
/// the gradient of the scores are rounded to bf16. cuda: for 16-bit dtypes, heads of 64 or 128 elements and
/// no dropout one fused kernel on tensor cores, which rounds probabilities to the dtype before they multiply
/// the values; else cuBLASLt GEMMs with a softmax between. Throws InvalidArgument when heads does not divide
/// width, shapes disagree or the workspace has less than attention_workspace_bytes.
void attention_forward(Stream& stream, const AttentionOptions& options,
                       const ConstTensorView& query_key_value, const TensorView& out,
                       const TensorView& log_sum_exp, const Workspace& workspace);

/// d_query_key_value is written (not added to). `out` is forward's result.
void attention_backward(Stream& stream, const AttentionOptions& options, const ConstTensorView& d_out,
                        const ConstTensorView& query_key_value, const ConstTensorView& out,
                        const ConstTensorView& log_sum_exp, const TensorView& d_query_key_value,
                        const Workspace& workspace);

/// The least workspace of forward and backward on any device; a function of the shape only. With
/// minimum_workspace_bytes times up to 10^6 and heads of up to 1500 elements run.
std::int64_t attention_workspace_bytes(std::int64_t head_width, std::int64_t time);

/// How attention runs: "tiles in fp32", "tiles in bf16, sums in fp32", "flash attention on tensor cores",
/// "cuBLASLt GEMMs and softmax". On cuda, tensors that do not start on 16 bytes always take the last.
std::string_view attention_path(DeviceKind device, DataType dtype, std::int64_t head_width, float dropout);

}  // namespace tranche::kernels
