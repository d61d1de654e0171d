#pragma once
/// Cross-entropy over a vocabulary that is processed in chunks of columns, so that full logits need never
/// exist. Usage: begin, accumulate for every chunk, finish, then gradient for every chunk.

#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"

namespace tranche::kernels {

/// The label that is left out of loss and gradient.
inline constexpr std::int32_t ignored_label = -100;

/// Running softmax statistics per row; three fp32 [rows] views in device memory.
struct CrossEntropyState {
  TensorView maximum;       ///< highest logit so far
  TensorView sum;           ///< sum of exp(logit - maximum)
  TensorView target_logit;  ///< logit of the label once its chunk was seen
};

void cross_entropy_begin(Stream& stream, const CrossEntropyState& state);
/// Folds logits[rows, columns] (fp32) of vocabulary columns [first_column, first_column + columns) into the
/// state. targets int32 [rows].
void cross_entropy_accumulate(Stream& stream, const ConstTensorView& logits, const ConstTensorView& targets,
                              std::int64_t first_column, const CrossEntropyState& state);
/// state = the state over all columns, computed from the states of ranks that have processed separate
/// columns: `states` fp32 [ranks][3][rows] holds maximum, sum and target logit of each rank, folded in rank
/// order. `state` is not a part of `states`.
void cross_entropy_combine(Stream& stream, const ConstTensorView& states, const CrossEntropyState& state);
/// loss_sum (one fp64) += sum over rows that are not ignored of -log p(target), rows in a fixed order (CPU:
/// one after another; cuda: 256 interleaved sums, then a tree); token_count (one int64) += their number.
void cross_entropy_finish(Stream& stream, const ConstTensorView& targets, const CrossEntropyState& state,
                          const TensorView& loss_sum, const TensorView& token_count);
/// d_logits = (softmax(logits) - onehot(target)) * scale, zero for ignored rows. d_logits has any floating
/// dtype; fp32 in place over logits is allowed.
void cross_entropy_gradient(Stream& stream, const ConstTensorView& logits, const ConstTensorView& targets,
                            std::int64_t first_column, const CrossEntropyState& state, float scale,
                            const TensorView& d_logits);

}  // namespace tranche::kernels
