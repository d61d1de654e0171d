#include "tranche/models/linear.h"

#include "tranche/engine/engine.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/matmul.h"
#include "tranche/kernels/matmul_rows.h"
#include "tranche/models/key_value_cache.h"
#include "tranche/models/weight_gradients.h"

namespace tranche::models {

void linear_forward(Engine& engine, const GatheredUnit& unit, const Linear& linear, const ConstTensorView& x,
                    const TensorView& out, bool by_rows) {
  Stream& stream = engine.compute_stream();
  const bool transposed = linear.layout == Linear::Layout::out_in;
  if (by_rows) {
    kernels::matmul_rows(stream, transposed, x, unit.tensor(linear.weight),
                         linear.bias < 0 ? ConstTensorView{} : unit.tensor(linear.bias), out,
                         engine.workspace());
  } else if (linear.bias < 0) {
    kernels::matmul(stream, {.transpose_b = transposed}, x, unit.tensor(linear.weight), out,
                    engine.workspace());
  } else {
    kernels::matmul_bias(stream, x, unit.tensor(linear.weight), unit.tensor(linear.bias), out,
                         engine.workspace(), transposed);
  }
}

void linear_forward(const Pass& pass, const GatheredUnit& unit, const Linear& linear,
                    const ConstTensorView& x, const TensorView& out) {
  linear_forward(pass.engine, unit, linear, x, out, pass.cache != nullptr && !pass.cache->from_start);
}

void linear_input_gradient(Engine& engine, const GatheredUnit& unit, const Linear& linear,
                           const ConstTensorView& d_out, const TensorView& d_x, bool accumulate) {
  kernels::matmul(engine.compute_stream(),
                  {.transpose_b = linear.layout == Linear::Layout::in_out, .accumulate = accumulate}, d_out,
                  unit.tensor(linear.weight), d_x, engine.workspace());
}

void linear_parameter_gradients(Engine& engine, const UnitGradients& gradients, const Linear& linear,
                                const ConstTensorView& x, const ConstTensorView& d_out) {
  Stream& stream = engine.compute_stream();
  if (gradients.wanted(linear.weight)) {
    const GradientTarget d_weight = gradients.target(linear.weight);
    const bool transposed = linear.layout == Linear::Layout::out_in;
    kernels::matmul(stream, {.transpose_a = true, .accumulate = d_weight.accumulate}, transposed ? d_out : x,
                    transposed ? x : d_out, d_weight.view, engine.workspace());
  }
  if (linear.bias >= 0 && gradients.wanted(linear.bias)) {
    kernels::bias_gradient(stream, d_out, gradients.tensor(linear.bias), engine.workspace());
  }
}

void linear_parameter_gradients(Engine& engine, WeightGradients& weights, const Linear& linear,
                                const ConstTensorView& x, const ConstTensorView& d_out) {
  weights.add([&engine, &gradients = weights.unit(), linear, x, d_out] {
    linear_parameter_gradients(engine, gradients, linear, x, d_out);
  });
}

void linear_backward(Engine& engine, const GatheredUnit& unit, const UnitGradients& gradients,
                     const Linear& linear, const ConstTensorView& x, const ConstTensorView& d_out,
                     const TensorView* d_x) {
  linear_parameter_gradients(engine, gradients, linear, x, d_out);
  if (d_x != nullptr) linear_input_gradient(engine, unit, linear, d_out, *d_x);
}

void linear_backward(Engine& engine, const GatheredUnit& unit, WeightGradients& weights, const Linear& linear,
                     const ConstTensorView& x, const ConstTensorView& d_out, const TensorView* d_x,
                     bool accumulate) {
  linear_parameter_gradients(engine, weights, linear, x, d_out);
  if (d_x != nullptr) linear_input_gradient(engine, unit, linear, d_out, *d_x, accumulate);
}

}  // namespace tranche::models
