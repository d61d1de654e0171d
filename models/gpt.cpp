// Embedding and head of GPT-2, which share one unit, and its description; the blocks are in gpt_block.cpp.
#include "tranche/models/gpt.h"

#include <fmt/core.h>

#include "models/chained_sums.h"
#include "models/drawn_weights.h"
#include "tranche/engine/engine.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/embedding.h"
#include "tranche/kernels/layer_norm.h"
#include "tranche/models/context_rows.h"
#include "tranche/models/key_value_cache.h"
#include "tranche/models/tensor_rows.h"

namespace tranche::models {

namespace {

/// Indices in unit "embedding"; the first is also the head's weight.
enum EmbeddingParameter : int { token_table, position_table, ln_f_weight, ln_f_bias };

/// The rows of a [positions, width] table from a run's first token on.
template <typename View>
View positions_of_run(const Pass& pass, const View& table, int run) {
  if (table.shape.rank() == 0) return table;
  const std::int64_t first = pass.first_of_run(run), rows = table.shape[0] - first, width = table.shape[1];
  return table.slice(first * width, rows * width).reshaped({rows, width});
}

}  // namespace

Gpt::Gpt(GptConfig config) : config_(config) {
  config_.validate("model configuration");
}

ModelSpec Gpt::spec(const GptConfig& config, std::int64_t sequence) {
  return Gpt(config).spec(sequence);
}

ModelShape Gpt::shape() const {
  return {.layers = config_.layers,
          .width = config_.width,
          .vocabulary = config_.vocabulary,
          .positions = config_.positions,
          .tied_head = true,
          .head_weight = token_table};
}

std::string Gpt::describe() const {
  return fmt::format("GPT-2 of {} layers, {} heads, width {}, vocabulary {}, {} positions: {} parameters",
                     config_.layers, config_.heads, config_.width, config_.vocabulary, config_.positions,
                     config_.parameters());
}

std::string Gpt::tensor_of(std::string_view stored) const {
  // Older versions of transformers saved masks with the weights.
  if (stored.ends_with(".attn.bias") || stored.ends_with(".attn.masked_bias")) return {};
  // A GPT2Model without a head has no prefix.
  if (stored.starts_with("transformer.") || stored.starts_with("lm_head.")) return std::string(stored);
  return "transformer." + std::string(stored);
}

double Gpt::block_operations(std::int64_t sequence) const {
  const auto width = static_cast<double>(config_.width);
  // On average a query has (sequence + 1) / 2 keys, with 4 * width operations each.
  return 2 * width *
         (4 * width + 2 * static_cast<double>(config_.inner_width()) + static_cast<double>(sequence + 1));
}

double Gpt::skipped_operations() const {
  return 2 * static_cast<double>(config_.width) * static_cast<double>(config_.inner_width());
}

UnitSpec Gpt::embedding_unit() const {
  const auto normal = drawn_weights(config_.initializer_range);
  const std::int64_t width = config_.width;
  return {.name = "embedding",
          .tensors = {{.name = "transformer.wte.weight",
                       .shape = {config_.vocabulary, width},
                       .initializer = normal,
                       .aliases = {"lm_head.weight"},
                       .linear = LinearLayout::out_in,
                       .dimensions = {{"vocabulary"}, {"width"}}},
                      {.name = "transformer.wpe.weight",
                       .shape = {config_.positions, width},
                       .initializer = normal,
                       .uses = {embedding_use}},
                      {.name = "transformer.ln_f.weight",
                       .shape = {width},
                       .initializer = Initializer::ones(),
                       .uses = {head_use}},
                      {.name = "transformer.ln_f.bias",
                       .shape = {width},
                       .initializer = Initializer::zeros(),
                       .uses = {head_use}}},
          .uses_per_micro_batch = 2};
}

std::optional<CacheHeads> Gpt::cache_heads() const {
  return CacheHeads{config_.heads, config_.width / config_.heads};
}

void Gpt::embedding_forward(const Pass& pass, const GatheredUnit& unit, const ConstTensorView& tokens,
                            const TensorView& out) const {
  Stream& stream = pass.engine.compute_stream();
  PartialRows partial(pass, out);
  const TensorView rows = partial.view().reshaped({pass.batch, pass.time, config_.width});
  // Padding may lie behind the table of positions.
  clear_padding(pass, rows);
  for (const RunPart& part : parts_of_runs(pass)) {
    kernels::embedding_forward(
        stream, rows_of_part(pass, tokens, part), pass.own_tokens(unit.tensor(token_table)),
        positions_of_run(pass, unit.tensor(position_table), part.run), rows_of_part(pass, rows, part),
        pass.positions.value_or(ConstTensorView{}), pass.first_token());
  }
  partial.scatter(unit.spec().name);
  if (pass.drops(config_.embedding_dropout)) dropout_rows(pass, config_.embedding_dropout, 0, out, out);
}

namespace {

/// With chained sums only the axis's first rank computes the gradient of the positions, in the order of a
/// single rank.
void chained_embedding_backward(const Pass& pass, const UnitGradients& gradients,
                                const ConstTensorView& tokens, const ConstTensorView& rows) {
  Stream& stream = pass.engine.compute_stream();
  const ConstTensorView d_out = rows.reshaped({pass.batch, pass.time, pass.shape.width});
  kernels::embedding_backward(stream, tokens, d_out, pass.own_tokens(gradients.tensor(token_table)), {},
                              pass.first_token());
  const StepTensors scratch(pass.engine, Category::activations, "position gradients",
                            {{DataType::int32, tokens.shape}, {DataType::float32, {1, pass.shape.width}}});
  if (pass.tensor_rank() != 0) return;
  // All tokens use row 0 of a table with one row.
  kernels::fill_zero(stream, scratch[0]);
  kernels::fill_zero(stream, scratch[1]);
  for (int run = 0; run < pass.runs(); ++run) {
    kernels::embedding_backward(stream, rows_of_run(pass, scratch[0], run), rows_of_run(pass, d_out, run),
                                scratch[1], positions_of_run(pass, gradients.tensor(position_table), run), 0);
  }
}

}  // namespace

void Gpt::embedding_backward(const Pass& pass, const UnitGradients& gradients, const ConstTensorView& tokens,
                             const TensorView& gradient) const {
  Stream& stream = pass.engine.compute_stream();
  if (pass.drops(config_.embedding_dropout)) {
    dropout_rows(pass, config_.embedding_dropout, 0, gradient, gradient);
  }
  if (!gradients.wanted(token_table) && !gradients.wanted(position_table)) return;
  const GatheredRows rows(pass, gradients.spec().name, gradient);
  if (pass.chained()) return chained_embedding_backward(pass, gradients, tokens, rows.view());
  const ConstTensorView d_out = rows.view().reshaped({pass.batch, pass.time, config_.width});
  for (const RunPart& part : parts_of_runs(pass)) {
    kernels::embedding_backward(stream, rows_of_part(pass, tokens, part), rows_of_part(pass, d_out, part),
                                pass.own_tokens(gradients.tensor(token_table)),
                                positions_of_run(pass, gradients.tensor(position_table), part.run),
                                pass.first_token());
  }
}

void Gpt::final_norm_forward(const Pass& pass, const GatheredUnit& unit, const ConstTensorView& x,
                             const FinalNorm& norm) const {
  kernels::layer_norm_forward(pass.engine.compute_stream(), x, unit.tensor(ln_f_weight),
                              unit.tensor(ln_f_bias), config_.layer_norm_epsilon, norm.normed, norm.mean,
                              norm.rstd);
}

void Gpt::final_norm_backward(const Pass& pass, const GatheredUnit& unit, const UnitGradients& gradients,
                              const TensorView& d_normed, const ConstTensorView& x, const FinalNorm& norm,
                              const TensorView& d_x) const {
  norm_backward(pass, unit, gradients, {ln_f_weight, ln_f_bias}, d_normed, x, norm.mean, norm.rstd, false,
                d_x);
}

}  // namespace tranche::models
