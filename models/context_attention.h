#pragma once
/// Attention if the mesh axis `context` divides the tokens (tranche/models/context_rows.h), for attend() and
/// attend_backward(), which have the same arguments. Collective over the axis.

#include <cstdint>

#include "tranche/kernels/attention.h"
#include "tranche/models/language_model.h"

namespace tranche::models {

/// The operands of attention for this rank's tokens.
struct AttentionInputs {
  kernels::ConstHeads query, key, value;
};
struct AttentionGradients {
  kernels::Heads query, key, value;
};

/// Gathers the keys and values of all ranks, in ascending order of their tokens; each of this rank's runs of
/// queries then attends to the same keys as on a single rank.
void gathered_attention(const Pass& pass, std::int64_t block, const kernels::AttentionOptions& options,
                        const AttentionInputs& inputs, const TensorView& out, const TensorView& log_sum_exp);

/// Gathers the keys and values once more. A rank's contributions to their gradients are rounded to the
/// compute dtype, summed over the ranks in fp32 and rank order, and the sum is rounded again.
void gathered_attention_backward(const Pass& pass, std::int64_t block,
                                 const kernels::AttentionOptions& options, const ConstTensorView& d_out,
                                 const AttentionInputs& inputs, const ConstTensorView& out,
                                 const ConstTensorView& log_sum_exp, const AttentionGradients& gradients);

/// Sends each rank the heads assigned to it, attends with this rank's heads over all tokens, as on a single
/// rank, and sends the results back. `kept` (attention_memory()) is saved for backward, and log_sum_exp is
/// that of this rank's heads.
void exchanged_attention(const Pass& pass, std::int64_t block, const kernels::AttentionOptions& options,
                         const AttentionInputs& inputs, const TensorView& out, const TensorView& log_sum_exp,
                         const TensorView& kept);

/// The backward, which reads the tensors saved in `kept` instead of the operands.
void exchanged_attention_backward(const Pass& pass, std::int64_t block,
                                  const kernels::AttentionOptions& options, const ConstTensorView& d_out,
                                  const ConstTensorView& log_sum_exp, const ConstTensorView& kept,
                                  const AttentionGradients& gradients);

}  // namespace tranche::models
