#pragma once
/// A linear layer, y = x W + b, and its backward; all models use it. Where the unit has an adapter beside the
/// weight (Config::lora), forward and gradients have its part, and the adapter's gradients are added.

#include "tranche/core/tensor_view.h"

namespace tranche {

class Engine;
class GatheredUnit;
class UnitGradients;

namespace models {

class PartialRows;
class WeightGradients;
struct Pass;

/// A linear layer's tensors, by their indices in the unit.
struct Linear {
  /// How W is stored: [in, out], as GPT-2 has it, or transposed, as torch.nn.Linear.
  enum class Layout : std::uint8_t { in_out, out_in };
  int weight = -1;
  int bias = -1;  ///< negative: none
  Layout layout = Layout::in_out;
};

/// out[rows, columns] = x[rows, inner] W[inner, columns] + b[columns]; with `by_rows` by
/// kernels::matmul_rows.
void linear_forward(Engine& engine, const GatheredUnit& unit, const Linear& linear, const ConstTensorView& x,
                    const TensorView& out, bool by_rows = false);
/// The same in a block's forward: by rows where the pass appends tokens to a cache.
void linear_forward(const Pass& pass, const GatheredUnit& unit, const Linear& linear,
                    const ConstTensorView& x, const TensorView& out);

/// d_x = d_out W^T, or += when `accumulate`.
void linear_input_gradient(Engine& engine, const GatheredUnit& unit, const Linear& linear,
                           const ConstTensorView& d_out, const TensorView& d_x, bool accumulate = false);

/// Adds the gradients of weight, bias and adapter, left out where frozen.
void linear_parameter_gradients(Engine& engine, const GatheredUnit& unit, const UnitGradients& gradients,
                                const Linear& linear, const ConstTensorView& x, const ConstTensorView& d_out);

/// The same, now or later; x and d_out are then read later, the unit is not.
void linear_parameter_gradients(Engine& engine, const GatheredUnit& unit, WeightGradients& weights,
                                const Linear& linear, const ConstTensorView& x, const ConstTensorView& d_out);

/// Both: adds the gradients of weight and bias (left out where frozen) and, when d_x is given, writes it or,
/// when `accumulate`, adds to it.
void linear_backward(Engine& engine, const GatheredUnit& unit, const UnitGradients& gradients,
                     const Linear& linear, const ConstTensorView& x, const ConstTensorView& d_out,
                     const TensorView* d_x);
void linear_backward(Engine& engine, const GatheredUnit& unit, WeightGradients& weights, const Linear& linear,
                     const ConstTensorView& x, const ConstTensorView& d_out, const TensorView* d_x,
                     bool accumulate = false);

/// A row layer, whose inputs the axis `tensor` cuts: out[R, columns] = this rank's rows of the sum over the
/// ranks of x[rows, inner] W[inner, columns], plus b; linear_forward() without the axis. The bias is whole on
/// every rank. Collective over the axis. A column layer, whose outputs are cut, is linear_forward() of
/// GatheredRows; its backward is column_linear_parameter_gradients() of the same rows, gathered again, and
/// column_linear_input_gradient() into PartialRows, which are then scattered (tensor_rows.h).
void row_linear_forward(const Pass& pass, const GatheredUnit& unit, const Linear& linear,
                        const ConstTensorView& x, const TensorView& out);
/// d_x = the gradient of a column layer's inputs, or += when `accumulate`: linear_input_gradient() into this
/// rank's addends, which are then scattered. In a chain (Pass::chained()) collective over the axis.
void column_linear_input_gradient(const Pass& pass, const GatheredUnit& unit, const Linear& linear,
                                  const ConstTensorView& d_out, PartialRows& d_x, bool accumulate = false);
/// Adds the gradients of a column layer, as linear_parameter_gradients() does. In a chain collective over the
/// axis, for an adapter's sake; d_out has no columns then on a rank whose outputs another one gives.
void column_linear_parameter_gradients(const Pass& pass, const GatheredUnit& unit, WeightGradients& weights,
                                       const Linear& linear, const ConstTensorView& x,
                                       const ConstTensorView& d_out);
/// Adds the gradients of a row layer: of weight and adapter from x and the gathered rows of d_out, of the
/// bias from this rank's own rows `local_d_out`, so that the sum over the ranks is whole.
void row_linear_parameter_gradients(const Pass& pass, const GatheredUnit& unit, WeightGradients& weights,
                                    const Linear& linear, const ConstTensorView& x,
                                    const ConstTensorView& d_out, const ConstTensorView& local_d_out);

}  // namespace models
}  // namespace tranche
