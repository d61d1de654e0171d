#include "tranche/models/weight_gradients.h"

#include "tranche/engine/engine.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::models {

ConstTensorView WeightGradients::lasting(Engine& engine, const ConstTensorView& view) {
  if (!later_) return view;
  kept_.emplace_back(engine, Category::activations, "gradient kept for weights",
                     std::initializer_list<TensorRequest>{{view.dtype, view.shape}});
  kernels::copy(engine.compute_stream(), view, kept_.back()[0]);
  return kept_.back()[0];
}

void WeightGradients::run() {
  for (const auto& work : work_) work();
  work_.clear();
  kept_.clear();
}

}  // namespace tranche::models
