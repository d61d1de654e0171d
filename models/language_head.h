#pragma once
/// Head and loss of a language model, its vocabulary in blocks of columns.

#include <optional>

#include "models/low_rank.h"
#include "tranche/engine/handles.h"
#include "tranche/models/language_model.h"

namespace tranche::models {

/// Columns of the vocabulary that the head computes together. Sums over the vocabulary are taken within a
/// block first, so the constant is part of the arithmetic.
inline constexpr std::int64_t head_block_columns = 4096;

/// Loss of the rows: *loss_sum += ..., *token_count += ... (kernels/cross_entropy.h). With `gradients`, also
/// the backward of head and final norm: adds to them and writes d_x [rows, width]. The head's weight gradient
/// is not put off: it reads the logits' gradient, which exists for one block of columns at a time. Logits
/// exist for Config::vocabulary_chunk columns at a time (0: all), rounded up to whole blocks; where that is
/// not all of them, logits are computed twice. The same kernels see the same blocks in the same order either
/// way, so the chunk changes no bit. `unit` is that of the head.
///
/// Where the axis `tensor` shares out the vocabulary, this rank computes the columns of its own for all rows,
/// and the ranks' softmax statistics, 3 fp32 numbers a row, are combined: no rank holds all logits, and every
/// rank adds the loss of all rows. x and d_x are its rows of the residual; collective over the axis.
void language_head(const LanguageModel& model, const Pass& pass, const GatheredUnit& unit,
                   const UnitGradients* gradients, const ConstTensorView& x, const ConstTensorView& targets,
                   const TensorView& loss_sum, const TensorView& token_count, const TensorView* d_x);

/// The head's adapter, if it has one, with this rank's rows of B.
std::optional<LowRank> head_adapter(const Pass& pass, const GatheredUnit& unit);

/// The gradient of this rank's rows of a tensor of the vocabulary. Where every rank has the whole tensor, the
/// other rows get nothing from this rank.
GradientTarget target_of_own(const Pass& pass, const UnitGradients& gradients, int tensor);

/// logits [count, vocabulary] fp32 of rows [first, first + count) of x, which has all rows; of this rank's
/// columns where the axis `tensor` shares out the vocabulary.
void language_logits(const LanguageModel& model, const Pass& pass, const GatheredUnit& unit,
                     const ConstTensorView& x, std::int64_t first, std::int64_t count,
                     const TensorView& logits);

}  // namespace tranche::models
