#pragma once
#include "tranche/kernels/cross_entropy.h"

namespace tranche::kernels::cuda {

/// As in kernels/cross_entropy.h, arguments checked; one launch each.
void cross_entropy_begin(Stream& stream, const CrossEntropyState& state);
void cross_entropy_accumulate(Stream& stream, const ConstTensorView& logits, const ConstTensorView& targets,
                              std::int64_t first_column, const CrossEntropyState& state);
void cross_entropy_finish(Stream& stream, const ConstTensorView& targets, const CrossEntropyState& state,
                          const TensorView& loss_sum, const TensorView& token_count);
void cross_entropy_gradient(Stream& stream, const ConstTensorView& logits, const ConstTensorView& targets,
                            std::int64_t first_column, const CrossEntropyState& state, float scale,
                            const TensorView& d_logits);

}  // namespace tranche::kernels::cuda
