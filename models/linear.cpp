#include "models/linear.h"

#include "tranche/engine/engine.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/matmul.h"
#include "tranche/models/weight_gradients.h"

namespace tranche::models {

void linear_forward(Engine& engine, const GatheredUnit& unit, int weight, int bias, const ConstTensorView& x,
                    const TensorView& out) {
  kernels::matmul_bias(engine.compute_stream(), x, unit.tensor(weight), unit.tensor(bias), out,
                       engine.workspace());
}

void linear_input_gradient(Engine& engine, const GatheredUnit& unit, int weight, const ConstTensorView& d_out,
                           const TensorView& d_x) {
  kernels::matmul(engine.compute_stream(), {.transpose_b = true}, d_out, unit.tensor(weight), d_x,
                  engine.workspace());
}

void linear_parameter_gradients(Engine& engine, const UnitGradients& gradients, int weight, int bias,
                                const ConstTensorView& x, const ConstTensorView& d_out) {
  Stream& stream = engine.compute_stream();
  if (gradients.wanted(weight)) {
    const GradientTarget d_weight = gradients.target(weight);
    kernels::matmul(stream, {.transpose_a = true, .accumulate = d_weight.accumulate}, x, d_out, d_weight.view,
                    engine.workspace());
  }
  if (gradients.wanted(bias))
    kernels::bias_gradient(stream, d_out, gradients.tensor(bias), engine.workspace());
}

void linear_parameter_gradients(Engine& engine, WeightGradients& weights, int weight, int bias,
                                const ConstTensorView& x, const ConstTensorView& d_out) {
  weights.add([&engine, &gradients = weights.unit(), weight, bias, x, d_out] {
    linear_parameter_gradients(engine, gradients, weight, bias, x, d_out);
  });
}

void linear_backward(Engine& engine, const GatheredUnit& unit, const UnitGradients& gradients, int weight,
                     int bias, const ConstTensorView& x, const ConstTensorView& d_out,
                     const TensorView* d_x) {
  linear_parameter_gradients(engine, gradients, weight, bias, x, d_out);
  if (d_x != nullptr) linear_input_gradient(engine, unit, weight, d_out, *d_x);
}

void linear_backward(Engine& engine, const GatheredUnit& unit, WeightGradients& weights, int weight, int bias,
                     const ConstTensorView& x, const ConstTensorView& d_out, const TensorView* d_x) {
  linear_parameter_gradients(engine, weights, weight, bias, x, d_out);
  if (d_x != nullptr) linear_input_gradient(engine, unit, weight, d_out, *d_x);
}

}  // namespace tranche::models
