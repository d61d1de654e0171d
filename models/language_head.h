#pragma once
/// Head and loss of a language model, with the vocabulary in blocks of columns.

#include <optional>

#include "models/low_rank.h"
#include "tranche/engine/handles.h"
#include "tranche/models/language_model.h"

namespace tranche::models {

/// The number of vocabulary columns that the head computes together. Sums over the vocabulary are first taken
/// within a block, so this constant affects the bits.
inline constexpr std::int64_t head_block_columns = 4096;

/// Loss of the rows: *loss_sum += ..., *token_count += ... (kernels/cross_entropy.h). With `gradients` it
/// also computes the backward of head and final norm: adds to them and writes d_x [rows, width]. The head's
/// weight gradient is never delayed, because it reads the logits' gradient, which exists for one block of
/// columns at a time. Logits exist for Config::vocabulary_chunk columns at a time (0: all), rounded up to
/// whole blocks; if that is not all columns, logits are computed twice. The same kernels process the same
/// blocks in the same order either way, so the chunk does not change bits. `unit` is the head's.
///
/// If the axis `tensor` divides the vocabulary, this rank computes its columns for all rows, and the ranks'
/// softmax statistics, 3 fp32 numbers a row, are combined: no rank holds all logits, and every rank adds the
/// loss of all rows. x and d_x are the rank's rows of the residual; collective over the axis.
void language_head(const LanguageModel& model, const Pass& pass, const GatheredUnit& unit,
                   const UnitGradients* gradients, const ConstTensorView& x, const ConstTensorView& targets,
                   const TensorView& loss_sum, const TensorView& token_count, const TensorView* d_x);

/// The head's adapter, if it has one, with this rank's rows of B.
std::optional<LowRank> head_adapter(const Pass& pass, const GatheredUnit& unit);

/// The gradient of this rank's rows of a tensor with the vocabulary as rows. If every rank has the whole
/// tensor, this rank adds nothing to the other rows.
GradientTarget target_of_own(const Pass& pass, const UnitGradients& gradients, int tensor);

/// Computes logits [count, vocabulary] fp32 of rows [first, first + count) of x, which has all rows; if the
/// axis `tensor` divides the vocabulary, only this rank's columns.
void language_logits(const LanguageModel& model, const Pass& pass, const GatheredUnit& unit,
                     const ConstTensorView& x, std::int64_t first, std::int64_t count,
                     const TensorView& logits);

}  // namespace tranche::models
