#pragma once
/// Attention where the axis `context` of the mesh shares out the tokens (tranche/models/context_rows.h), for
/// attend() and attend_backward(), whose arguments they have. Collective over the axis.

#include <cstdint>

#include "tranche/kernels/attention.h"
#include "tranche/models/language_model.h"

namespace tranche::models {

/// The operands of attention, of this rank's tokens.
struct AttentionInputs {
  kernels::ConstHeads query, key, value;
};
struct AttentionGradients {
  kernels::Heads query, key, value;
};

/// The keys and values of all ranks are gathered, in ascending order of their tokens, and each of this rank's
/// runs of queries sees those that it sees on one rank.
void gathered_attention(const Pass& pass, std::int64_t block, const kernels::AttentionOptions& options,
                        const AttentionInputs& inputs, const TensorView& out, const TensorView& log_sum_exp);

/// The keys and values are gathered once more; what each rank's queries give their gradients is added up in
/// rank order, in fp32, and rounded once to the compute dtype.
void gathered_attention_backward(const Pass& pass, std::int64_t block,
                                 const kernels::AttentionOptions& options, const ConstTensorView& d_out,
                                 const AttentionInputs& inputs, const ConstTensorView& out,
                                 const ConstTensorView& log_sum_exp, const AttentionGradients& gradients);

/// Each rank sends the others the heads that are theirs, attends with its own as on one rank, with all tokens,
/// and sends the results back. `kept` (attention_memory()) is left for backward, and log_sum_exp is that of
/// this rank's heads.
void exchanged_attention(const Pass& pass, std::int64_t block, const kernels::AttentionOptions& options,
                         const AttentionInputs& inputs, const TensorView& out, const TensorView& log_sum_exp,
                         const TensorView& kept);

/// Reads what forward kept in place of its operands.
void exchanged_attention_backward(const Pass& pass, std::int64_t block,
                                  const kernels::AttentionOptions& options, const ConstTensorView& d_out,
                                  const ConstTensorView& log_sum_exp, const ConstTensorView& kept,
                                  const AttentionGradients& gradients);

}  // namespace tranche::models
