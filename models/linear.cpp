#include "tranche/models/linear.h"

#include "tranche/engine/engine.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/matmul.h"

namespace tranche::models {

void linear_forward(Engine& engine, const GatheredUnit& unit, int weight, int bias, const ConstTensorView& x,
                    const TensorView& out) {
  kernels::matmul_bias(engine.compute_stream(), x, unit.tensor(weight), unit.tensor(bias), out,
                       engine.workspace());
}

void linear_backward(Engine& engine, const GatheredUnit& unit, const UnitGradients& gradients, int weight,
                     int bias, const ConstTensorView& x, const ConstTensorView& d_out,
                     const TensorView* d_x) {
  Stream& stream = engine.compute_stream();
  if (gradients.wanted(weight)) {
    kernels::matmul(stream, {.transpose_a = true, .accumulate = true}, x, d_out, gradients.tensor(weight),
                    engine.workspace());
  }
  if (gradients.wanted(bias))
    kernels::bias_gradient(stream, d_out, gradients.tensor(bias), engine.workspace());
  if (d_x != nullptr) {
    kernels::matmul(stream, {.transpose_b = true}, d_out, unit.tensor(weight), *d_x, engine.workspace());
  }
}

}  // namespace tranche::models
