#pragma once
/// A caller's own schedule of a language model's units: weight gradients after all input gradients.

#include <vector>

#include "models/language_head.h"
#include "tranche/engine/engine.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/models/language_model.h"
#include "tranche/models/weight_gradients.h"

namespace tranche::models {

/// Computes what LanguageModel::forward_backward does, without recomputation. The gradients of the blocks'
/// weights come after all input gradients.
inline void weights_last(const LanguageModel& model, Engine& engine, const TokenBatch& batch) {
  Pass pass = model.pass_of(engine, batch, true);
  engine.begin_micro_batch({}, batch.samples);
  const auto layers = static_cast<std::size_t>(pass.shape.layers);
  const auto residual = [&] {
    return StepTensors(engine, Category::activations, "residual",
                       {{pass.dtype(), {pass.local_rows(), pass.shape.width}}});
  };
  const StepTensors totals(engine, Category::activations, "loss and tokens",
                           {{DataType::float64, {}}, {DataType::int64, {}}});
  for (int i = 0; i < 2; ++i) kernels::fill_zero(engine.compute_stream(), totals[i]);
  pass.tables = model.acquire_tables(pass);
  std::vector<StepTensors> residuals, activations;
  residuals.push_back(residual());
  model.embedding_forward(pass, engine.gather({0}), batch.tokens, residuals[0][0]);
  for (std::size_t i = 0; i < layers; ++i) {
    const auto block = static_cast<std::int64_t>(i);
    activations.push_back(model.acquire_block_activations(pass));
    residuals.push_back(residual());
    model.block_forward(pass, block, engine.gather(model.unit_of_block(block)), residuals[i][0],
                        activations[i], &residuals[i + 1][0]);
  }
  const StepTensors gradient = residual();
  {
    const GatheredUnit unit = engine.gather(model.unit_of_head());
    UnitGradients gradients = engine.gradients(model.unit_of_head());
    language_head(model, pass, unit, &gradients, residuals.back()[0], batch.targets, totals[0], totals[1],
                  &gradient[0]);
    std::move(gradients).reduce();
  }
  std::vector<UnitGradients> gradients;
  std::vector<WeightGradients> weights;
  gradients.reserve(layers);
  for (std::size_t i = layers; i-- > 0;) {
    const auto block = static_cast<std::int64_t>(i);
    gradients.push_back(engine.gradients(model.unit_of_block(block)));
    weights.emplace_back(gradients.back(), WeightGradients::When::later);
    model.block_backward(pass, block, engine.gather(model.unit_of_block(block)), weights.back(),
                         residuals[i][0], activations[i], gradient[0]);
  }
  UnitGradients last = engine.gradients({0});
  model.embedding_backward(pass, last, batch.tokens, gradient[0]);
  // Delayed weight gradients must not read it.
  kernels::fill_zero(engine.compute_stream(), gradient[0]);
  std::move(last).reduce();
  for (std::size_t i = 0; i < layers; ++i) {
    weights[i].run();
    std::move(gradients[i]).reduce();
  }
  engine.end_micro_batch(totals[0], totals[1]);
}

}  // namespace tranche::models
