// The blocks of GPT-2: attention and MLP, each after a layer norm, each added to the residual.

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "models/chained_sums.h"
#include "models/drawn_weights.h"
#include "tranche/engine/engine.h"
#include "tranche/kernels/attention.h"
#include "tranche/kernels/layer_norm.h"
#include "tranche/models/context_rows.h"
#include "tranche/models/gpt.h"
#include "tranche/models/key_value_cache.h"
#include "tranche/models/linear.h"
#include "tranche/models/tensor_rows.h"
#include "tranche/models/weight_gradients.h"

namespace tranche::models {

namespace {

/// Indices in the block's unit.
enum Parameter : int {
  ln_1_weight,
  ln_1_bias,
  attn_weight,
  attn_bias,
  attn_projection_weight,
  attn_projection_bias,
  ln_2_weight,
  ln_2_bias,
  mlp_weight,
  mlp_bias,
  mlp_projection_weight,
  mlp_projection_bias,
};

/// Indices in the block's saved activations.
enum SavedActivation : int {
  mean_1,
  rstd_1,
  normed_1,
  query_key_value,
  attended,
  log_sum_exp,
  attention_residual,  ///< the residual stream between attention and MLP
  mean_2,
  rstd_2,
  normed_2,
  hidden,
  kept,  ///< attention_memory()
};

enum DropoutSite : std::uint32_t { probabilities, after_attention, after_mlp };

/// Site 0 is the embedding's; each block has three, numbered from 1 + 3 * block.
std::uint32_t dropout_site(std::int64_t block, DropoutSite which) {
  return narrow<std::uint32_t>(1 + 3 * block + which);
}

/// The sizes of the part of a block that this rank computes.
struct LocalSizes {
  DimensionPart heads;
  std::int64_t heads_width, inner;
  LocalSizes(const Pass& pass, const GptConfig& config)
      : heads(pass.part_of(config.heads)),
        heads_width(heads.count * (config.width / config.heads)),
        inner(pass.of_layers("inner").part_of(config.inner_width()).count) {}
};

}  // namespace

UnitSpec Gpt::block_unit(std::int64_t block) const {
  const std::string prefix = "transformer.h." + std::to_string(block) + ".";
  const std::int64_t width = config_.width, inner = config_.inner_width();
  const auto normal = drawn_weights(config_.initializer_range);
  // Each block adds twice to the residual; scaling keeps its variance at the end independent of the depth.
  const auto residual =
      drawn_weights(config_.initializer_range / std::sqrt(2.0f * static_cast<float>(config_.layers)));
  const auto zeros = Initializer::zeros(), ones = Initializer::ones();
  constexpr LinearLayout in_out = LinearLayout::in_out;
  const std::int64_t head_size = width / config_.heads;
  UnitSpec unit{.name = "h." + std::to_string(block),
                .tensors = {{prefix + "ln_1.weight", {width}, ones},
                            {prefix + "ln_1.bias", {width}, zeros},
                            {prefix + "attn.c_attn.weight", {width, 3 * width}, normal, {}, in_out, false, 3},
                            {prefix + "attn.c_attn.bias", {3 * width}, zeros},
                            {prefix + "attn.c_proj.weight", {width, width}, residual, {}, in_out, false, 1},
                            {prefix + "attn.c_proj.bias", {width}, zeros},
                            {prefix + "ln_2.weight", {width}, ones},
                            {prefix + "ln_2.bias", {width}, zeros},
                            {prefix + "mlp.c_fc.weight", {width, inner}, normal, {}, in_out, false, 1},
                            {prefix + "mlp.c_fc.bias", {inner}, zeros},
                            {prefix + "mlp.c_proj.weight", {inner, width}, residual, {}, in_out, false, 1},
                            {prefix + "mlp.c_proj.bias", {width}, zeros}}};
  const Dimension whole{"width"}, inner_dimension{"inner"}, heads{"heads", 1, head_size},
      three_of_heads{"heads", 3, head_size};
  const auto name = [&](Parameter tensor, std::vector<Dimension> dimensions) {
    unit.tensors[static_cast<std::size_t>(tensor)].dimensions = std::move(dimensions);
  };
  name(attn_weight, {whole, three_of_heads});
  name(attn_bias, {three_of_heads});
  name(attn_projection_weight, {heads, whole});
  name(mlp_weight, {whole, inner_dimension});
  name(mlp_bias, {inner_dimension});
  name(mlp_projection_weight, {inner_dimension, whole});
  return unit;
}

StepTensors Gpt::acquire_block_activations(const Pass& pass) const {
  const auto dtype = pass.dtype();
  const std::int64_t local = pass.local_rows(), width = config_.width;
  const LocalSizes sizes(pass, config_);
  return {pass.engine,
          Category::activations,
          "block activations",
          {{DataType::float32, {local}},
           {DataType::float32, {local}},
           {dtype, {local, width}},
           {dtype, {pass.exchanges_heads() ? 0 : pass.batch, pass.time, 3 * sizes.heads_width}},
           {dtype, {pass.batch, pass.time, sizes.heads_width}},
           {DataType::float32, {pass.batch, sizes.heads.count, pass.time}},
           {dtype, {local, width}},
           {DataType::float32, {local}},
           {DataType::float32, {local}},
           {dtype, {local, width}},
           {dtype, {pass.of_layers("inner").rows(), sizes.inner}},
           attention_memory(pass, sizes.heads_width, sizes.heads_width)}};
}

void Gpt::block_forward(const Pass& pass, std::int64_t block, const GatheredUnit& unit,
                        const ConstTensorView& input, const StepTensors& saved,
                        const TensorView* output) const {
  Engine& engine = pass.engine;
  Stream& stream = engine.compute_stream();
  const GptConfig& config = config_;
  const LocalSizes sizes(pass, config);
  const std::int64_t rows = pass.rows(), width = sizes.heads_width;
  const std::string& name = unit.spec().name;
  const kernels::AttentionOptions attention{
      .heads = sizes.heads.count,
      .dropout = pass.dropout(config.attention_dropout, dropout_site(block, probabilities)),
      .first_head = sizes.heads.first};

  kernels::layer_norm_forward(stream, input, unit.tensor(ln_1_weight), unit.tensor(ln_1_bias),
                              config.layer_norm_epsilon, saved[normed_1], saved[mean_1], saved[rstd_1]);
  {
    // If attention saves its operands itself, they are not saved a second time.
    StepTensors own;
    if (pass.exchanges_heads()) {
      own = StepTensors(engine, Category::activations, "queries, keys and values",
                        {{pass.dtype(), {pass.batch, pass.time, 3 * width}}});
    }
    const TensorView& packed = own.held() ? own[0] : saved[query_key_value];
    linear_forward(pass, unit, {attn_weight, attn_bias}, GatheredRows(pass, name, saved[normed_1]).view(),
                   packed.reshaped({rows, 3 * width}));
    attend(pass, block, attention, {packed}, {packed, width}, {packed, 2 * width}, saved[attended],
           saved[log_sum_exp], saved[kept]);
  }
  row_linear_forward(pass, unit, {attn_projection_weight, attn_projection_bias},
                     saved[attended].reshaped({rows, width}), saved[attention_residual]);
  if (pass.drops(config.residual_dropout)) {
    dropout_rows(pass, config.residual_dropout, dropout_site(block, after_attention),
                 saved[attention_residual], saved[attention_residual]);
  }
  kernels::residual_layer_norm_forward(
      stream, input, saved[attention_residual], unit.tensor(ln_2_weight), unit.tensor(ln_2_bias),
      config.layer_norm_epsilon, saved[attention_residual], saved[normed_2], saved[mean_2], saved[rstd_2]);
  const Pass mlp = pass.of_layers("inner");
  linear_forward(mlp, unit, {mlp_weight, mlp_bias}, GatheredRows(mlp, name, saved[normed_2]).view(),
                 saved[hidden]);
  if (output == nullptr) return;
  {
    const StepTensors activated(engine, Category::activations, "MLP forward",
                                {{pass.dtype(), saved[hidden].shape}});
    kernels::gelu_forward(stream, saved[hidden], activated[0]);
    row_linear_forward(mlp, unit, {mlp_projection_weight, mlp_projection_bias}, activated[0], *output);
  }
  if (pass.drops(config.residual_dropout)) {
    dropout_rows(pass, config.residual_dropout, dropout_site(block, after_mlp), *output, *output);
  }
  kernels::add(stream, saved[attention_residual], *output, *output);
}

void Gpt::block_backward(const Pass& pass, std::int64_t block, const GatheredUnit& unit,
                         WeightGradients& weights, const ConstTensorView& input, const StepTensors& saved,
                         const TensorView& gradient) const {
  Engine& engine = pass.engine;
  Stream& stream = engine.compute_stream();
  const GptConfig& config = config_;
  const auto dtype = pass.dtype();
  const LocalSizes sizes(pass, config);
  const std::int64_t rows = pass.rows(), local = pass.local_rows(), width = sizes.heads_width;
  const std::string& name = unit.spec().name;

  const UnitGradients& gradients = weights.unit();

  // The residual passes `gradient` on unchanged, so a gradient after dropout needs separate memory.
  const auto through_dropout = [&](DropoutSite which, const TensorView& scratch) -> ConstTensorView {
    if (!pass.drops(config.residual_dropout)) return weights.lasting(engine, gradient);
    dropout_rows(pass, config.residual_dropout, dropout_site(block, which), gradient, scratch);
    return weights.lasting(engine, scratch);
  };

  // The whole input was not saved, so it is gathered again.
  const auto column_backward = [&](const Pass& layer, const Linear& linear, const ConstTensorView& local_x,
                                   const ConstTensorView& d_out, const TensorView& d_x) {
    GatheredRows x(layer, name, local_x);
    column_linear_parameter_gradients(layer, unit, weights, linear, x.view(), d_out);
    weights.keep(x.take());
    PartialRows partial(layer, d_x);
    column_linear_input_gradient(layer, unit, linear, d_out, partial);
    partial.scatter(name);
  };

  {
    const Pass mlp = pass.of_layers("inner");
    StepTensors scratch(
        engine, Category::activations, "MLP backward",
        {{dtype, {local, config.width}}, {dtype, saved[hidden].shape}, {dtype, saved[hidden].shape}});
    const TensorView narrow_scratch = scratch[0], d_hidden = scratch[1], activated = scratch[2];
    const ConstTensorView local_d_out = through_dropout(after_mlp, narrow_scratch);
    GatheredRows d_out(mlp, name, local_d_out);
    linear_input_gradient(engine, unit, {mlp_projection_weight}, d_out.view(), d_hidden);
    // GELU's output is recomputed, not saved: that is a quarter of the block's activations, and its gradient
    // needs the same input.
    kernels::gelu_forward_backward(stream, saved[hidden], d_hidden, activated, d_hidden);
    row_linear_parameter_gradients(mlp, unit, weights, {mlp_projection_weight, mlp_projection_bias},
                                   activated, d_out.view(), local_d_out);
    weights.keep(d_out.take());
    column_backward(mlp, {mlp_weight, mlp_bias}, saved[normed_2], d_hidden, narrow_scratch);
    norm_backward(pass, unit, gradients, {ln_2_weight, ln_2_bias}, narrow_scratch, saved[attention_residual],
                  saved[mean_2], saved[rstd_2], true, gradient);
    weights.keep(std::move(scratch));
  }
  {
    StepTensors scratch(engine, Category::activations, "attention backward",
                        {{dtype, {local, config.width}},
                         {dtype, {pass.batch, pass.time, width}},
                         {dtype, {pass.batch, pass.time, 3 * width}}});
    const TensorView narrow_scratch = scratch[0], d_attended = scratch[1], d_query_key_value = scratch[2];
    const ConstTensorView local_d_out = through_dropout(after_attention, narrow_scratch);
    {
      GatheredRows d_out(pass, name, local_d_out);
      row_linear_parameter_gradients(pass, unit, weights, {attn_projection_weight, attn_projection_bias},
                                     saved[attended].reshaped({rows, width}), d_out.view(), local_d_out);
      linear_input_gradient(engine, unit, {attn_projection_weight}, d_out.view(),
                            d_attended.reshaped({rows, width}));
      weights.keep(d_out.take());
    }
    const kernels::AttentionOptions attention{
        .heads = sizes.heads.count,
        .dropout = pass.dropout(config.attention_dropout, dropout_site(block, probabilities)),
        .first_head = sizes.heads.first};
    const TensorView& packed = saved[query_key_value];
    attend_backward(pass, block, attention, d_attended, {packed}, {packed, width}, {packed, 2 * width},
                    saved[attended], saved[log_sum_exp], {d_query_key_value}, {d_query_key_value, width},
                    {d_query_key_value, 2 * width}, saved[kept]);
    column_backward(pass, {attn_weight, attn_bias}, saved[normed_1],
                    d_query_key_value.reshaped({rows, 3 * width}), narrow_scratch);
    norm_backward(pass, unit, gradients, {ln_1_weight, ln_1_bias}, narrow_scratch, input, saved[mean_1],
                  saved[rstd_1], true, gradient);
    weights.keep(std::move(scratch));
  }
}

}  // namespace tranche::models
