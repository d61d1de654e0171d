#pragma once
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
/// side as GPT-2 packs them; out [batch, time, width]; log_sum_exp fp32 [batch, heads, time] is kept for
/// backward, the score matrix is not. Scores are scaled by 1 / sqrt(width / heads). Softmax in fp32.
/// Throws InvalidArgument when heads does not divide width or shapes disagree.
void attention_forward(Stream& stream, const AttentionOptions& options,
                       const ConstTensorView& query_key_value, const TensorView& out,
                       const TensorView& log_sum_exp, const Workspace& workspace);

/// d_query_key_value is written (not added to). `out` is forward's result.
void attention_backward(Stream& stream, const AttentionOptions& options, const ConstTensorView& d_out,
                        const ConstTensorView& query_key_value, const ConstTensorView& out,
                        const ConstTensorView& log_sum_exp, const TensorView& d_query_key_value,
                        const Workspace& workspace);

}  // namespace tranche::kernels
