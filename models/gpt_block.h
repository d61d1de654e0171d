#pragma once
/// A transformer block of GPT-2: attention and MLP, each behind a layer norm, each added to the residual.

#include <cstdint>
#include <span>

#include "models/step_tensors.h"
#include "tranche/engine/model_spec.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/models/gpt_config.h"

namespace tranche {

class GatheredUnit;
class UnitGradients;

namespace models {

/// The state that all parts of the model share while a micro-batch is computed.
struct GptPass {
  Engine& engine;
  const GptConfig& config;
  std::int64_t batch = 0;
  std::int64_t time = 0;
  std::span<const std::int64_t> samples;  ///< global sample indices
  bool training = false;                  ///< dropout on

  std::int64_t rows() const { return batch * time; }
  DataType dtype() const;
  /// Dropout at a site, which keys its random numbers; probability 0 when not training.
  kernels::DropoutOptions dropout(float probability, std::uint32_t site) const;
};

/// Dropout site ids: 0 is the embedding's; a block has three, counted from 1 + 3 * block.
std::uint32_t dropout_site(std::int64_t block, std::uint32_t which);

/// Unit "h.<index>" with Hugging Face's names, shapes (Conv1D: [in, out]) and initial weights.
UnitSpec gpt_block_unit(const GptConfig& config, std::int64_t index);

/// The saved activations of forward for backward: 7 * width + inner elements a token, and the norms' and
/// softmax's statistics.
StepTensors acquire_block_activations(const GptPass& pass);

/// *output = block(input); input and output [rows, width] in the compute dtype, not the same memory. Without
/// output only the activations are computed, for a backward that follows.
void gpt_block_forward(const GptPass& pass, std::int64_t block, const GatheredUnit& unit,
                       const ConstTensorView& input, const StepTensors& activations,
                       const TensorView* output);

/// Turns `gradient`, that of the output, into that of the input, in place; adds the unit's gradients.
/// Activations and input are forward's, or a recomputation's, which has the same bits.
void gpt_block_backward(const GptPass& pass, std::int64_t block, const GatheredUnit& unit,
                        const UnitGradients& gradients, const ConstTensorView& input,
                        const StepTensors& activations, const TensorView& gradient);

}  // namespace models
}  // namespace tranche
