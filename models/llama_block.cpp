// The blocks of the Llama family: attention and SwiGLU, each after an RMSNorm, each added to the residual.

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <string>
#include <utility>

#include "models/chained_sums.h"
#include "models/drawn_weights.h"
#include "tranche/engine/engine.h"
#include "tranche/kernels/attention.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/rms_norm.h"
#include "tranche/kernels/rope.h"
#include "tranche/kernels/swiglu.h"
#include "tranche/models/key_value_cache.h"
#include "tranche/models/linear.h"
#include "tranche/models/llama.h"
#include "tranche/models/tensor_rows.h"
#include "tranche/models/weight_gradients.h"

namespace tranche::models {

namespace {

/// Indices in the block's unit; -1 for tensors that an architecture lacks.
struct LlamaBlockIndices {
  int norm_1 = -1, norm_2 = -1, query_norm = -1, key_norm = -1;
  Linear query, key, value, output, gate, up, down;
};

/// Assigns indices to the block's tensors, in the order of its forward; appends them to `tensors` unless that
/// is null.
LlamaBlockIndices lay_out(const LlamaConfig& config, std::int64_t block, std::vector<TensorSpec>* tensors) {
  const auto normal = drawn_weights(config.initializer_range);
  int next = 0;
  const auto add = [&](const char* name, const Shape& shape, const Initializer& initializer) {
    if (tensors != nullptr) {
      tensors->push_back({fmt::format("model.layers.{}.{}.{}", block, name,
                                      shape.rank() == 1 && initializer.a == 0 ? "bias" : "weight"),
                          shape, initializer});
    }
    return next++;
  };
  const auto linear = [&](const char* name, std::int64_t out, std::int64_t in, bool bias,
                          const Dimension& outputs, const Dimension& inputs) {
    Linear result{.weight = add(name, {out, in}, normal), .layout = Linear::Layout::out_in};
    if (tensors != nullptr) {
      tensors->back().linear = LinearLayout::out_in;
      tensors->back().matrices = 1;
      tensors->back().dimensions = {outputs, inputs};
    }
    if (bias) result.bias = add(name, {out}, Initializer::zeros());
    if (bias && tensors != nullptr) tensors->back().dimensions = {outputs};
    return result;
  };
  const auto norm = [&](const char* name, std::int64_t width) {
    return add(name, {width}, Initializer::ones());
  };
  const std::int64_t width = config.width, queries = config.query_width(), keys = config.key_value_width();
  const bool biases = config.query_key_value_bias();
  const Dimension width_dimension{"width"}, inner{"inner"}, heads{"heads", 1, config.head_dim},
      key_value_heads{"key_value_heads", 1, config.head_dim};
  LlamaBlockIndices at;
  at.norm_1 = norm("input_layernorm", width);
  at.query = linear("self_attn.q_proj", queries, width, biases, heads, width_dimension);
  at.key = linear("self_attn.k_proj", keys, width, biases, key_value_heads, width_dimension);
  at.value = linear("self_attn.v_proj", keys, width, biases, key_value_heads, width_dimension);
  if (config.query_key_norm()) {
    at.query_norm = norm("self_attn.q_norm", config.head_dim);
    at.key_norm = norm("self_attn.k_norm", config.head_dim);
  }
  at.output = linear("self_attn.o_proj", width, queries, config.output_bias(), width_dimension, heads);
  at.norm_2 = norm("post_attention_layernorm", width);
  at.gate = linear("mlp.gate_proj", config.inner, width, config.mlp_bias, inner, width_dimension);
  at.up = linear("mlp.up_proj", config.inner, width, config.mlp_bias, inner, width_dimension);
  at.down = linear("mlp.down_proj", width, config.inner, config.mlp_bias, width_dimension, inner);
  return at;
}

/// Indices in the block's saved activations.
enum LlamaActivation : int {
  rstd_1,
  normed_1,
  query,  ///< rotated; if it has a norm, before norm and rotation
  key,
  value,
  query_rstd,  ///< of the query norm, for each head; empty without it
  key_rstd,
  attended,
  log_sum_exp,
  attention_residual,  ///< the residual stream between attention and MLP
  rstd_2,
  normed_2,
  gate,
  up,
  kept,  ///< attention_memory()
};

/// Queries and keys in the form that attention reads.
struct Rotated {
  TensorView query, key;
};

/// A forward's queries, keys and values before attention: saved activations, or temporary memory if attention
/// itself saves what backward reads (attention_memory()).
struct LlamaOperands {
  StepTensors memory;
  Rotated query_and_key;
  TensorView value;
};

/// The sizes of the part of a block that this rank computes.
struct LlamaSizes {
  DimensionPart heads, key_value_heads;
  std::int64_t queries, keys, inner;
  int sharers;  ///< ranks of the axis `tensor` that share a head of keys and values
  LlamaSizes(const Pass& pass, const LlamaConfig& config)
      : heads(pass.part_of(config.heads)),
        key_value_heads(pass.part_of(config.key_value_heads)),
        queries(heads.count * config.head_dim),
        keys(key_value_heads.count * config.head_dim),
        inner(pass.of_layers("inner").part_of(config.inner).count),
        sharers(std::max(1, pass.tensor_ranks() / narrow<int>(config.key_value_heads))) {}
};

/// A step of a block: the sizes, and the kernels that both forward and backward call.
struct LlamaStep {
  const LlamaConfig& config;
  const Pass& pass;
  const GatheredUnit& unit;
  const StepTensors& saved;
  LlamaBlockIndices at;
  LlamaSizes sizes{pass, config};
  Engine& engine = pass.engine;
  Stream& stream = engine.compute_stream();

  TensorView by_head(const TensorView& x, std::int64_t heads) const {
    return x.reshaped({pass.rows() * heads, config.head_dim});
  }
  void rotate(bool inverse, const Rotated& x) const {
    kernels::rope(stream, inverse, pass.tables[0], sizes.heads.count, config.head_dim, x.query);
    kernels::rope(stream, inverse, pass.tables[0], sizes.key_value_heads.count, config.head_dim, x.key);
  }
  LlamaOperands acquire_operands() const {
    if (!pass.exchanges_heads()) return {{}, {saved[query], saved[key]}, saved[value]};
    // The backward of the norms reads their inputs.
    const std::int64_t rows = pass.rows(), not_saved = config.query_key_norm() ? 0 : rows;
    StepTensors own(engine, Category::activations, "queries, keys and values",
                    {{pass.dtype(), {not_saved, sizes.queries}},
                     {pass.dtype(), {not_saved, sizes.keys}},
                     {pass.dtype(), {rows, sizes.keys}}});
    const Rotated before = not_saved > 0 ? Rotated{own[0], own[1]} : Rotated{saved[query], saved[key]};
    const TensorView values = own[2];
    return {std::move(own), before, values};
  }
  /// Applies norms, if there are any, and rotation to queries and keys. With norms the results are in
  /// `scratch`, because backward reads the saved inputs; otherwise in place.
  Rotated norm_and_rotate(const Rotated& before, const StepTensors& scratch) const {
    if (!config.query_key_norm()) {
      rotate(false, before);
      return before;
    }
    const Rotated result{scratch[0], scratch[1]};
    const std::int64_t heads = sizes.heads.count, key_heads = sizes.key_value_heads.count;
    kernels::rms_norm_forward(stream, by_head(saved[query], heads), unit.tensor(at.query_norm),
                              config.norm_epsilon, by_head(result.query, heads), saved[query_rstd]);
    kernels::rms_norm_forward(stream, by_head(saved[key], key_heads), unit.tensor(at.key_norm),
                              config.norm_epsilon, by_head(result.key, key_heads), saved[key_rstd]);
    rotate(false, result);
    return result;
  }
  /// Memory for norm_and_rotate(); empty if it works in place.
  StepTensors acquire_rotated() const {
    if (!config.query_key_norm()) return {};
    return {engine,
            Category::activations,
            "rotated queries and keys",
            {{pass.dtype(), {pass.rows(), sizes.queries}}, {pass.dtype(), {pass.rows(), sizes.keys}}}};
  }
  kernels::AttentionOptions attention(std::int64_t block) const {
    return {.heads = sizes.heads.count,
            .key_value_heads = sizes.key_value_heads.count,
            .window = config.window_of(block),
            .dropout = pass.dropout(config.attention_dropout, narrow<std::uint32_t>(1 + block)),
            .document_begin = pass.document_begin.value_or(ConstTensorView{}),
            .first_head = sizes.heads.first};
  }
  /// Reshapes [rows, n] to [batch, time, n]; an operand that was not saved stays empty.
  TensorView by_sequence(const TensorView& x) const {
    if (x.shape[0] == 0) return x;
    return x.reshaped({pass.batch, pass.time, x.shape[1]});
  }
};

}  // namespace

UnitSpec Llama::block_unit(std::int64_t block) const {
  UnitSpec unit{.name = fmt::format("layers.{}", block), .tensors = {}};
  (void)lay_out(config_, block, &unit.tensors);
  return unit;
}

StepTensors Llama::acquire_block_activations(const Pass& pass) const {
  const auto dtype = pass.dtype();
  const std::int64_t rows = pass.rows(), local = pass.local_rows(),
                     norms = config_.query_key_norm() ? rows : 0;
  // Operands that attention saves itself are not saved again.
  const std::int64_t values = pass.exchanges_heads() ? 0 : rows, operands = std::max(values, norms);
  const LlamaSizes sizes(pass, config_);
  return {pass.engine,
          Category::activations,
          "block activations",
          {{DataType::float32, {local}},
           {dtype, {local, config_.width}},
           {dtype, {operands, sizes.queries}},
           {dtype, {operands, sizes.keys}},
           {dtype, {values, sizes.keys}},
           {DataType::float32, {norms * sizes.heads.count}},
           {DataType::float32, {norms * sizes.key_value_heads.count}},
           {dtype, {rows, sizes.queries}},
           {DataType::float32, {pass.batch, sizes.heads.count, pass.time}},
           {dtype, {local, config_.width}},
           {DataType::float32, {local}},
           {dtype, {local, config_.width}},
           {dtype, {pass.of_layers("inner").rows(), sizes.inner}},
           {dtype, {pass.of_layers("inner").rows(), sizes.inner}},
           attention_memory(pass, sizes.queries, sizes.keys)}};
}

void Llama::block_forward(const Pass& pass, std::int64_t block, const GatheredUnit& unit,
                          const ConstTensorView& input, const StepTensors& saved,
                          const TensorView* output) const {
  const LlamaStep step{config_, pass, unit, saved, lay_out(config_, block, nullptr)};
  Engine& engine = pass.engine;
  Stream& stream = engine.compute_stream();
  const LlamaBlockIndices& at = step.at;

  kernels::rms_norm_forward(stream, input, unit.tensor(at.norm_1), config_.norm_epsilon, saved[normed_1],
                            saved[rstd_1]);
  const std::string& name = unit.spec().name;
  {
    const LlamaOperands operands = step.acquire_operands();
    const auto& [own_query, own_key] = operands.query_and_key;
    {
      const GatheredRows normed(pass, name, saved[normed_1]);
      linear_forward(pass, unit, at.query, normed.view(), own_query);
      linear_forward(pass, unit, at.key, normed.view(), own_key);
      linear_forward(pass, unit, at.value, normed.view(), operands.value);
    }
    const StepTensors scratch = step.acquire_rotated();
    const Rotated rotated = step.norm_and_rotate(operands.query_and_key, scratch);
    attend(pass, block, step.attention(block), {step.by_sequence(rotated.query)},
           {step.by_sequence(rotated.key)}, {step.by_sequence(operands.value)},
           step.by_sequence(saved[attended]), saved[log_sum_exp], saved[kept]);
  }
  row_linear_forward(pass, unit, at.output, saved[attended], saved[attention_residual]);
  kernels::residual_rms_norm_forward(stream, input, saved[attention_residual], unit.tensor(at.norm_2),
                                     config_.norm_epsilon, saved[attention_residual], saved[normed_2],
                                     saved[rstd_2]);
  const Pass mlp = pass.of_layers("inner");
  {
    const GatheredRows normed(mlp, name, saved[normed_2]);
    linear_forward(mlp, unit, at.gate, normed.view(), saved[gate]);
    linear_forward(mlp, unit, at.up, normed.view(), saved[up]);
  }
  if (output == nullptr) return;
  const StepTensors activated(engine, Category::activations, "MLP forward",
                              {{pass.dtype(), saved[gate].shape}});
  kernels::swiglu_forward(stream, saved[gate], saved[up], activated[0]);
  row_linear_forward(mlp, unit, at.down, activated[0], *output);
  kernels::add(stream, saved[attention_residual], *output, *output);
}

void Llama::block_backward(const Pass& pass, std::int64_t block, const GatheredUnit& unit,
                           WeightGradients& weights, const ConstTensorView& input, const StepTensors& saved,
                           const TensorView& gradient) const {
  const LlamaStep step{config_, pass, unit, saved, lay_out(config_, block, nullptr)};
  Engine& engine = pass.engine;
  Stream& stream = engine.compute_stream();
  const UnitGradients& gradients = weights.unit();
  const LlamaBlockIndices& at = step.at;
  const auto dtype = pass.dtype();
  const std::int64_t rows = pass.rows(), width = config_.width, local = pass.local_rows(),
                     queries = step.sizes.queries, keys = step.sizes.keys;
  const std::string& name = unit.spec().name;
  // The whole input of parallel layers was not saved, so it is gathered again. The gradients of their inputs
  // form one sum over the ranks.
  const auto column_backward = [&](const Pass& of_layers, const ConstTensorView& local_x,
                                   const TensorView& d_x,
                                   std::initializer_list<std::pair<Linear, ConstTensorView>> layers) {
    GatheredRows x(of_layers, name, local_x);
    PartialRows partial(of_layers, d_x);
    bool accumulate = false;
    for (const auto& [linear, d_out] : layers) {
      column_linear_parameter_gradients(of_layers, unit, weights, linear, x.view(), d_out);
      column_linear_input_gradient(of_layers, unit, linear, d_out, partial, accumulate);
      accumulate = true;
    }
    weights.keep(x.take());
    partial.scatter(name);
  };

  {
    const Pass mlp = pass.of_layers("inner");
    StepTensors scratch(engine, Category::activations, "MLP backward",
                        {{dtype, {local, width}}, {dtype, saved[gate].shape}});
    const TensorView d_normed = scratch[0], activated = scratch[1];
    const ConstTensorView local_d_out = weights.lasting(engine, gradient);
    GatheredRows d_out(mlp, name, local_d_out);
    linear_input_gradient(engine, unit, at.down, d_out.view(), activated);
    // SwiGLU's output is recomputed instead of saved, because its gradient needs the same inputs. It
    // overwrites its gradient, and the gradients of gate and up overwrite gate and up.
    kernels::swiglu_forward_backward(stream, saved[gate], saved[up], activated, activated, saved[gate],
                                     saved[up]);
    row_linear_parameter_gradients(mlp, unit, weights, at.down, activated, d_out.view(), local_d_out);
    weights.keep(d_out.take());
    column_backward(mlp, saved[normed_2], d_normed, {{at.gate, saved[gate]}, {at.up, saved[up]}});
    norm_backward(pass, unit, gradients, {at.norm_2}, d_normed, saved[attention_residual], {}, saved[rstd_2],
                  true, gradient);
    weights.keep(std::move(scratch));
  }
  StepTensors scratch(engine, Category::activations, "attention backward",
                      {{dtype, {local, width}},
                       {dtype, {rows, queries}},
                       {dtype, {rows, queries}},
                       {dtype, {rows, keys}},
                       {dtype, {rows, keys}}});
  const TensorView d_normed = scratch[0], d_attended = scratch[1], d_value = scratch[4];
  Rotated d{scratch[2], scratch[3]};
  {
    const ConstTensorView local_d_out = weights.lasting(engine, gradient);
    GatheredRows d_out(pass, name, local_d_out);
    row_linear_parameter_gradients(pass, unit, weights, at.output, saved[attended], d_out.view(),
                                   local_d_out);
    linear_input_gradient(engine, unit, at.output, d_out.view(), d_attended);
    weights.keep(d_out.take());
  }
  StepTensors again = step.acquire_rotated();
  const Rotated before{saved[query], saved[key]};
  const Rotated rotated = config_.query_key_norm() ? step.norm_and_rotate(before, again) : before;
  const int sharers = step.sizes.sharers;
  if (pass.chained() && sharers > 1) {
    shared_attention_backward(pass, unit, step.attention(block), sharers, d_attended,
                              {rotated.query, rotated.key, saved[value]}, saved[attended], saved[log_sum_exp],
                              {d.query, d.key, d_value});
  } else {
    attend_backward(pass, block, step.attention(block), step.by_sequence(d_attended),
                    {step.by_sequence(rotated.query)}, {step.by_sequence(rotated.key)},
                    {step.by_sequence(saved[value])}, step.by_sequence(saved[attended]), saved[log_sum_exp],
                    {step.by_sequence(d.query)}, {step.by_sequence(d.key)}, {step.by_sequence(d_value)},
                    saved[kept]);
  }
  step.rotate(true, d);
  if (config_.query_key_norm()) {
    head_norm_backward(pass, unit, gradients, at.query_norm, d.query, saved[query], saved[query_rstd], 1,
                       rotated.query);
    head_norm_backward(pass, unit, gradients, at.key_norm, d.key, saved[key], saved[key_rstd], sharers,
                       rotated.key);
    d = rotated;
  }
  // With chained sums the first of the ranks that share a head has the whole gradients.
  const auto once = [&](const ConstTensorView& shared) {
    const bool whole = !pass.chained() || pass.tensor_rank() % sharers == 0;
    return whole ? shared : ConstTensorView(shared.data, shared.dtype, {rows, 0});
  };
  column_backward(pass, saved[normed_1], d_normed,
                  {{at.query, d.query}, {at.key, once(d.key)}, {at.value, once(d_value)}});
  norm_backward(pass, unit, gradients, {at.norm_1}, d_normed, input, {}, saved[rstd_1], true, gradient);
  weights.keep(std::move(scratch));
  weights.keep(std::move(again));
}

}  // namespace tranche::models
