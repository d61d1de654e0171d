#pragma once
/// A linear layer, y = x W + b, and its backward, used by all models. If the unit has an adapter beside the
/// weight (Config::lora), forward and gradients include it, and the adapter's gradients are added too.

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
  /// The storage of W: [in, out], as in GPT-2, or transposed, as in torch.nn.Linear.
  enum class Layout : std::uint8_t { in_out, out_in };
  int weight = -1;
  int bias = -1;  ///< negative: none
  Layout layout = Layout::in_out;
};

/// out[rows, columns] = x[rows, inner] W[inner, columns] + b[columns]; `by_rows` uses kernels::matmul_rows.
void linear_forward(Engine& engine, const GatheredUnit& unit, const Linear& linear, const ConstTensorView& x,
                    const TensorView& out, bool by_rows = false);
/// The same in a block's forward, using matmul_rows if the pass appends tokens to a cache.
void linear_forward(const Pass& pass, const GatheredUnit& unit, const Linear& linear,
                    const ConstTensorView& x, const TensorView& out);

/// d_x = d_out W^T, or += when `accumulate`.
void linear_input_gradient(Engine& engine, const GatheredUnit& unit, const Linear& linear,
                           const ConstTensorView& d_out, const TensorView& d_x, bool accumulate = false);

/// Adds the gradients of weight, bias and adapter, except frozen ones.
void linear_parameter_gradients(Engine& engine, const GatheredUnit& unit, const UnitGradients& gradients,
                                const Linear& linear, const ConstTensorView& x, const ConstTensorView& d_out);

/// The same, now or later; in the latter case x and d_out are read later, but the unit is not.
void linear_parameter_gradients(Engine& engine, const GatheredUnit& unit, WeightGradients& weights,
                                const Linear& linear, const ConstTensorView& x, const ConstTensorView& d_out);

/// Both of the above: adds the gradients of weight and bias (except frozen ones), and writes d_x if it is
/// given, or adds to it if `accumulate`.
void linear_backward(Engine& engine, const GatheredUnit& unit, const UnitGradients& gradients,
                     const Linear& linear, const ConstTensorView& x, const ConstTensorView& d_out,
                     const TensorView* d_x);
void linear_backward(Engine& engine, const GatheredUnit& unit, WeightGradients& weights, const Linear& linear,
                     const ConstTensorView& x, const ConstTensorView& d_out, const TensorView* d_x,
                     bool accumulate = false);

/// The forward of a row layer, whose inputs the axis `tensor` cuts: out[R, columns] = this rank's rows of the
/// sum over the ranks of x[rows, inner] W[inner, columns], plus b; without the axis equal to
/// linear_forward(). The bias is whole on every rank. Collective over the axis. A column layer, whose outputs
/// are cut, uses linear_forward() of GatheredRows; its backward uses column_linear_parameter_gradients() of
/// the same rows, gathered again, and column_linear_input_gradient() into PartialRows, which are then
/// scattered (tensor_rows.h).
void row_linear_forward(const Pass& pass, const GatheredUnit& unit, const Linear& linear,
                        const ConstTensorView& x, const TensorView& out);
/// d_x = the gradient of a column layer's inputs, or += if `accumulate`: linear_input_gradient() into this
/// rank's addends, which are scattered later. With chained sums (Pass::chained()) it is collective over the
/// axis.
void column_linear_input_gradient(const Pass& pass, const GatheredUnit& unit, const Linear& linear,
                                  const ConstTensorView& d_out, PartialRows& d_x, bool accumulate = false);
/// Adds the gradients of a column layer, like linear_parameter_gradients(). With chained sums it is
/// collective over the axis, because of adapters; d_out then has no columns on a rank whose outputs another
/// rank covers.
void column_linear_parameter_gradients(const Pass& pass, const GatheredUnit& unit, WeightGradients& weights,
                                       const Linear& linear, const ConstTensorView& x,
                                       const ConstTensorView& d_out);
/// Adds the gradients of a row layer: those of weight and adapter from x and the gathered rows of d_out, that
/// of the bias from this rank's own rows `local_d_out`, so that the sum over the ranks is the whole gradient.
void row_linear_parameter_gradients(const Pass& pass, const GatheredUnit& unit, WeightGradients& weights,
                                    const Linear& linear, const ConstTensorView& x,
                                    const ConstTensorView& d_out, const ConstTensorView& local_d_out);

}  // namespace models
}  // namespace tranche
