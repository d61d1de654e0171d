#include "tranche/models/linear.h"

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "models/chained_sums.h"
#include "models/low_rank.h"
#include "tranche/engine/engine.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/matmul.h"
#include "tranche/kernels/matmul_rows.h"
#include "tranche/models/key_value_cache.h"
#include "tranche/models/tensor_rows.h"
#include "tranche/models/weight_gradients.h"

namespace tranche::models {

namespace {

/// Adds the gradients of weight and bias, without the adapter's.
void own_gradients(Engine& engine, const UnitGradients& gradients, const Linear& linear,
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

/// The same, now or later.
void add_own_gradients(Engine& engine, WeightGradients& weights, const Linear& linear,
                       const ConstTensorView& x, const ConstTensorView& d_out) {
  const UnitGradients& gradients = weights.unit();
  if (!gradients.wanted(linear.weight) && (linear.bias < 0 || !gradients.wanted(linear.bias))) return;
  weights.add(
      [&engine, &gradients, linear, x, d_out] { own_gradients(engine, gradients, linear, x, d_out); });
}

/// The narrow products of an adapter's backward, and which of its gradients this rank adds.
struct AdapterBackward {
  std::function<void(const TensorView&)> inner, inner_gradient;
  bool adds_a = true, adds_b = true;
};

/// Adds the gradients of an adapter. Its products need the unit's weights, so they are not delayed with the
/// others.
void add_adapter_gradients(Engine& engine, WeightGradients& weights, const LowRank& low_rank,
                           const ConstTensorView& x, const ConstTensorView& d_out,
                           const AdapterBackward& backward) {
  const Shape narrow_rows{x.shape[0], low_rank.rank()};
  StepTensors memory(engine, Category::activations, "adapter backward",
                     {{low_rank.dtype(), narrow_rows}, {low_rank.dtype(), narrow_rows}});
  const TensorView inner = memory[0], d_inner = memory[1];
  backward.inner(inner);
  backward.inner_gradient(d_inner);
  weights.add([&engine, &gradients = weights.unit(), adapter = low_rank.adapter(), x, d_out, inner, d_inner,
               adds_a = backward.adds_a, adds_b = backward.adds_b] {
    if (adds_b) add_b_gradient(engine, gradients, adapter, inner, d_out);
    if (adds_a) add_a_gradient(engine, gradients, adapter, x, d_inner);
  });
  weights.keep(std::move(memory));
}

/// Adds the gradients of a layer that needs no message. With `adds` false the rank takes the same memory as
/// the others and adds nothing.
void whole_gradients(Engine& engine, const GatheredUnit& unit, WeightGradients& weights, const Linear& linear,
                     const ConstTensorView& x, const ConstTensorView& d_out, bool adds = true) {
  if (adds) add_own_gradients(engine, weights, linear, x, d_out);
  const std::optional<LowRank> low_rank = LowRank::of(engine, unit, linear.weight);
  if (!low_rank) return;
  add_adapter_gradients(
      engine, weights, *low_rank, x, d_out,
      {[&](const TensorView& inner) { low_rank->inner(x, inner); },
       [&](const TensorView& d_inner) { low_rank->inner_gradient(d_out, d_inner); }, adds, adds});
}

/// Adds the gradients of a layer that computes only this rank's rows. With chained sums the axis's first rank
/// computes them from all rows, as one rank does, and the others add nothing.
void gradients_of_own_rows(const Pass& pass, const GatheredUnit& unit, WeightGradients& weights,
                           const Linear& linear, const ConstTensorView& x, const ConstTensorView& d_out) {
  if (pass.all_rows == nullptr) return whole_gradients(pass.engine, unit, weights, linear, x, d_out);
  const Pass& all = *pass.all_rows;
  const std::string& name = unit.spec().name;
  GatheredRows all_x(all, name, x), all_d_out(all, name, d_out);
  whole_gradients(pass.engine, unit, weights, linear, all_x.view(), all_d_out.view(), all.tensor_rank() == 0);
  weights.keep(all_x.take());
  weights.keep(all_d_out.take());
}

/// The number of blocks of a layer's outputs, each of which is cut separately.
int output_blocks(const GatheredUnit& unit, const Linear& linear) {
  const auto& dimensions = unit.spec().tensors[static_cast<std::size_t>(linear.weight)].dimensions;
  return dimensions[linear.layout == Linear::Layout::in_out ? 1 : 0].blocks;
}

}  // namespace

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
  if (const auto low_rank = LowRank::of(engine, unit, linear.weight)) {
    low_rank->forward(x, out, by_rows);
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
  const auto low_rank = LowRank::of(engine, unit, linear.weight);
  if (!low_rank) return;
  const StepTensors memory(engine, Category::activations, "adapter backward",
                           {{low_rank->dtype(), {d_out.shape[0], low_rank->rank()}}});
  low_rank->inner_gradient(d_out, memory[0]);
  low_rank->input_gradient(memory[0], d_x);
}

void linear_parameter_gradients(Engine& engine, const GatheredUnit& unit, const UnitGradients& gradients,
                                const Linear& linear, const ConstTensorView& x,
                                const ConstTensorView& d_out) {
  WeightGradients now(gradients);
  linear_parameter_gradients(engine, unit, now, linear, x, d_out);
}

void linear_parameter_gradients(Engine& engine, const GatheredUnit& unit, WeightGradients& weights,
                                const Linear& linear, const ConstTensorView& x,
                                const ConstTensorView& d_out) {
  whole_gradients(engine, unit, weights, linear, x, d_out);
}

void linear_backward(Engine& engine, const GatheredUnit& unit, const UnitGradients& gradients,
                     const Linear& linear, const ConstTensorView& x, const ConstTensorView& d_out,
                     const TensorView* d_x) {
  linear_parameter_gradients(engine, unit, gradients, linear, x, d_out);
  if (d_x != nullptr) linear_input_gradient(engine, unit, linear, d_out, *d_x);
}

void linear_backward(Engine& engine, const GatheredUnit& unit, WeightGradients& weights, const Linear& linear,
                     const ConstTensorView& x, const ConstTensorView& d_out, const TensorView* d_x,
                     bool accumulate) {
  linear_parameter_gradients(engine, unit, weights, linear, x, d_out);
  if (d_x != nullptr) linear_input_gradient(engine, unit, linear, d_out, *d_x, accumulate);
}

void row_linear_forward(const Pass& pass, const GatheredUnit& unit, const Linear& linear,
                        const ConstTensorView& x, const TensorView& out) {
  if (pass.tensor == nullptr) return linear_forward(pass, unit, linear, x, out);
  PartialRows partial(pass, out);
  const std::string& name = unit.spec().name;
  // Tokens appended to a cache are multiplied row by row, whose sums have another order.
  if (pass.chained() && (pass.cache == nullptr || pass.cache->from_start)) {
    const ChainedPart part{x, unit.tensor(linear.weight)};
    chained_product(pass, name, {&part, 1}, linear.layout == Linear::Layout::out_in, false, partial.view());
    partial.mark_complete();
    if (const auto low_rank = LowRank::of(pass.engine, unit, linear.weight)) {
      // On a single rank the bias is added before the adapter's output.
      if (linear.bias >= 0) {
        kernels::add_bias(pass.engine.compute_stream(), partial.view(), unit.tensor(linear.bias));
      }
      const StepTensors memory(pass.engine, Category::activations, "adapter",
                               {{low_rank->dtype(), {x.shape[0], low_rank->rank()}}});
      low_rank->chained_inner(pass, x, memory[0]);
      low_rank->add_outputs(memory[0], partial.view());
      return partial.scatter(name);
    }
  } else {
    linear_forward(pass, unit, {.weight = linear.weight, .layout = linear.layout}, x, partial.view());
  }
  partial.scatter(name);
  if (linear.bias >= 0) kernels::add_bias(pass.engine.compute_stream(), out, unit.tensor(linear.bias));
}

void column_linear_input_gradient(const Pass& pass, const GatheredUnit& unit, const Linear& linear,
                                  const ConstTensorView& d_out, PartialRows& d_x, bool accumulate) {
  Engine& engine = pass.engine;
  if (!pass.chained()) {
    return linear_input_gradient(engine, unit, linear, d_out, d_x.view(), accumulate);
  }
  d_x.mark_complete();
  const bool in_out = linear.layout == Linear::Layout::in_out;
  const std::string& name = unit.spec().name;
  const int blocks = output_blocks(unit, linear);
  {
    const BlocksOfColumns parts(engine, d_out, unit.tensor(linear.weight), in_out, blocks);
    chained_product(pass, name, parts.list(), in_out, accumulate, d_x.view());
  }
  const auto low_rank = LowRank::of(engine, unit, linear.weight);
  if (!low_rank) return;
  const StepTensors memory(engine, Category::activations, "adapter backward",
                           {{low_rank->dtype(), {d_out.shape[0], low_rank->rank()}}});
  low_rank->chained_inner_gradient(pass, d_out, blocks, memory[0]);
  low_rank->input_gradient(memory[0], d_x.view());
}

void column_linear_parameter_gradients(const Pass& pass, const GatheredUnit& unit, WeightGradients& weights,
                                       const Linear& linear, const ConstTensorView& x,
                                       const ConstTensorView& d_out) {
  Engine& engine = pass.engine;
  if (pass.tensor == nullptr) return gradients_of_own_rows(pass, unit, weights, linear, x, d_out);
  const auto low_rank = pass.chained() ? LowRank::of(engine, unit, linear.weight) : std::optional<LowRank>();
  const bool has_outputs = d_out.shape[1] > 0;
  if (!low_rank) {
    if (has_outputs) whole_gradients(engine, unit, weights, linear, x, d_out);
    return;
  }
  if (has_outputs) add_own_gradients(engine, weights, linear, x, d_out);
  // A is whole on every rank, but only one rank adds its gradient.
  add_adapter_gradients(engine, weights, *low_rank, x, d_out,
                        {[&](const TensorView& inner) { low_rank->inner(x, inner); },
                         [&](const TensorView& d_inner) {
                           low_rank->chained_inner_gradient(pass, d_out, output_blocks(unit, linear),
                                                            d_inner);
                         },
                         pass.tensor_rank() == 0, has_outputs});
}

void row_linear_parameter_gradients(const Pass& pass, const GatheredUnit& unit, WeightGradients& weights,
                                    const Linear& linear, const ConstTensorView& x,
                                    const ConstTensorView& d_out, const ConstTensorView& local_d_out) {
  Engine& engine = pass.engine;
  if (pass.tensor == nullptr) return gradients_of_own_rows(pass, unit, weights, linear, x, d_out);
  const Linear without_bias{.weight = linear.weight, .layout = linear.layout};
  const UnitGradients& gradients = weights.unit();
  const auto low_rank = pass.chained() ? LowRank::of(engine, unit, linear.weight) : std::optional<LowRank>();
  if (low_rank) {
    add_own_gradients(engine, weights, without_bias, x, d_out);
    // B is whole on every rank, but only one rank adds its gradient.
    add_adapter_gradients(engine, weights, *low_rank, x, d_out,
                          {[&](const TensorView& inner) { low_rank->chained_inner(pass, x, inner); },
                           [&](const TensorView& d_inner) { low_rank->inner_gradient(d_out, d_inner); }, true,
                           pass.tensor_rank() == 0});
  } else {
    whole_gradients(engine, unit, weights, without_bias, x, d_out);
  }
  if (linear.bias < 0 || !gradients.wanted(linear.bias)) return;
  if (pass.chained()) {  // the sum over all rows, which only the axis's first rank adds
    if (pass.tensor_rank() != 0) return;
    return weights.add([&engine, &gradients, bias = linear.bias, d_out] {
      kernels::bias_gradient(engine.compute_stream(), d_out, gradients.tensor(bias), engine.workspace());
    });
  }
  weights.add([&engine, &gradients, bias = linear.bias, local_d_out] {
    kernels::bias_gradient(engine.compute_stream(), local_d_out, gradients.tensor(bias), engine.workspace());
  });
}

}  // namespace tranche::models
