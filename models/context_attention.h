#pragma once
/// Attention where the axis `context` of the mesh shares out the tokens (tranche/models/context_rows.h), for
/// attend() and attend_backward(), whose arguments they have. Collective over the axis.

#include <cstdint>

#include "tranche/kernels/attention.h"
#include "tranche/models/language_model.h"

namespace tranche::models {

/// The keys and values of all ranks are gathered, in ascending order of their tokens, and each of this rank's
/// runs of queries sees those that it sees on one rank.
void gathered_attention(const Pass& pass, std::int64_t block, const kernels::AttentionOptions& options,
                        const kernels::ConstHeads& query, const kernels::ConstHeads& key,
                        const kernels::ConstHeads& value, const TensorView& out,
                        const TensorView& log_sum_exp);

/// The keys and values are gathered once more; what each rank's queries give their gradients is added up in
/// rank order, in fp32, and rounded once to the compute dtype.
void gathered_attention_backward(const Pass& pass, std::int64_t block,
                                 const kernels::AttentionOptions& options, const ConstTensorView& d_out,
                                 const kernels::ConstHeads& query, const kernels::ConstHeads& key,
                                 const kernels::ConstHeads& value, const ConstTensorView& out,
                                 const ConstTensorView& log_sum_exp, const kernels::Heads& d_query,
                                 const kernels::Heads& d_key, const kernels::Heads& d_value);

}  // namespace tranche::models
