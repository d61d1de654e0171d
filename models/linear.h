#pragma once
/// A linear layer, y = x W + b, and its backward; both models use it.

#include "tranche/core/tensor_view.h"

namespace tranche {

class Engine;
class GatheredUnit;
class UnitGradients;

namespace models {

class WeightGradients;

/// out[rows, columns] = x[rows, inner] weight[inner, columns] + bias[columns]. `weight` and `bias` are
/// indices in the unit.
void linear_forward(Engine& engine, const GatheredUnit& unit, int weight, int bias, const ConstTensorView& x,
                    const TensorView& out);

/// d_x = d_out weight^T.
void linear_input_gradient(Engine& engine, const GatheredUnit& unit, int weight, const ConstTensorView& d_out,
                           const TensorView& d_x);

/// Adds the gradients of weight and bias, left out where frozen.
void linear_parameter_gradients(Engine& engine, const UnitGradients& gradients, int weight, int bias,
                                const ConstTensorView& x, const ConstTensorView& d_out);

/// The same, now or later; x and d_out are then read later.
void linear_parameter_gradients(Engine& engine, WeightGradients& weights, int weight, int bias,
                                const ConstTensorView& x, const ConstTensorView& d_out);

/// Both: adds the gradients of weight and bias (left out where frozen) and, when d_x is given, writes
/// d_x = d_out weight^T.
void linear_backward(Engine& engine, const GatheredUnit& unit, const UnitGradients& gradients, int weight,
                     int bias, const ConstTensorView& x, const ConstTensorView& d_out, const TensorView* d_x);
void linear_backward(Engine& engine, const GatheredUnit& unit, WeightGradients& weights, int weight, int bias,
                     const ConstTensorView& x, const ConstTensorView& d_out, const TensorView* d_x);

}  // namespace models
}  // namespace tranche
