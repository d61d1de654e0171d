#pragma once
/// The two ends of GPT-2, which share one unit: the embedding and, tied to it, the final norm and head.

#include "models/gpt_block.h"

namespace tranche::models {

/// Unit "embedding": wte, wpe and ln_f. Its gradients are requested twice a micro-batch, by the head and,
/// last, by the embedding.
UnitSpec gpt_embedding_unit(const GptConfig& config);

/// out[rows, width] = dropout(wte[tokens] + wpe).
void gpt_embedding_forward(const GptPass& pass, const GatheredUnit& unit, const ConstTensorView& tokens,
                           const TensorView& out);
/// Adds the gradients of wte and wpe; needs no weights. `gradient` [rows, width] is overwritten.
void gpt_embedding_backward(const GptPass& pass, const UnitGradients& gradients,
                            const ConstTensorView& tokens, const TensorView& gradient);

/// Columns of the vocabulary that the head computes together. Sums over the vocabulary are taken within a
/// block first, so the constant is part of the arithmetic.
inline constexpr std::int64_t head_block_columns = 4096;

/// Loss of the rows: *loss_sum += ..., *token_count += ... (kernels/cross_entropy.h). With `gradients`, also
/// the backward of head and final norm: adds to them and writes d_x [rows, width]. Logits exist for
/// Config::vocabulary_chunk columns at a time (0: all), rounded up to whole blocks; where that is not all of
/// them, logits are computed twice. The same kernels see the same blocks in the same order either way, so the
/// chunk changes no bit.
void gpt_head(const GptPass& pass, const GatheredUnit& unit, const UnitGradients* gradients,
              const ConstTensorView& x, const ConstTensorView& targets, const TensorView& loss_sum,
              const TensorView& token_count, const TensorView* d_x);

/// logits [count, vocabulary] fp32 of rows [first, first + count) of x.
void gpt_logits(const GptPass& pass, const GatheredUnit& unit, const ConstTensorView& x, std::int64_t first,
                std::int64_t count, const TensorView& logits);

}  // namespace tranche::models
