// The two ends of GPT-2, which share one unit, and what it says of itself; its blocks are in gpt_block.cpp.
#include "tranche/models/gpt.h"

#include <fmt/core.h>

#include "tranche/engine/engine.h"
#include "tranche/kernels/embedding.h"
#include "tranche/kernels/layer_norm.h"
#include "tranche/models/key_value_cache.h"
#include "tranche/models/tensor_rows.h"

namespace tranche::models {

namespace {

/// Indices in unit "embedding", of which the head's weight is the first.
enum EmbeddingParameter : int { token_table, position_table, ln_f_weight, ln_f_bias };

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
  // Masks that older versions of transformers saved with the weights.
  if (stored.ends_with(".attn.bias") || stored.ends_with(".attn.masked_bias")) return {};
  // A GPT2Model without a head has no prefix.
  if (stored.starts_with("transformer.") || stored.starts_with("lm_head.")) return std::string(stored);
  return "transformer." + std::string(stored);
}

double Gpt::block_operations(std::int64_t sequence) const {
  const auto width = static_cast<double>(config_.width);
  // On average (sequence + 1) / 2 keys a query, 4 * width operations a key.
  return 2 * width *
         (4 * width + 2 * static_cast<double>(config_.inner_width()) + static_cast<double>(sequence + 1));
}

double Gpt::skipped_operations() const {
  return 2 * static_cast<double>(config_.width) * static_cast<double>(config_.inner_width());
}

UnitSpec Gpt::embedding_unit() const {
  const auto normal = Initializer::normal(config_.initializer_range);
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
  kernels::embedding_forward(stream, tokens, pass.own_tokens(unit.tensor(token_table)),
                             unit.tensor(position_table),
                             partial.view().reshaped({pass.batch, pass.time, config_.width}),
                             pass.positions.value_or(ConstTensorView{}), pass.first_token());
  partial.scatter(unit.spec().name);
  const auto options = pass.row_dropout(config_.embedding_dropout, 0);
  if (options.probability > 0) kernels::dropout(stream, options, out, out);
}

void Gpt::embedding_backward(const Pass& pass, const UnitGradients& gradients, const ConstTensorView& tokens,
                             const TensorView& gradient) const {
  Stream& stream = pass.engine.compute_stream();
  const auto options = pass.row_dropout(config_.embedding_dropout, 0);
  if (options.probability > 0) kernels::dropout(stream, options, gradient, gradient);
  if (!gradients.wanted(token_table) && !gradients.wanted(position_table)) return;
  const GatheredRows rows(pass, gradients.spec().name, gradient);
  kernels::embedding_backward(stream, tokens, rows.view().reshaped({pass.batch, pass.time, config_.width}),
                              pass.own_tokens(gradients.tensor(token_table)),
                              gradients.tensor(position_table), pass.first_token());
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
  kernels::layer_norm_backward(pass.engine.compute_stream(), d_normed, x, unit.tensor(ln_f_weight), norm.mean,
                               norm.rstd, false, d_x, gradients.tensor(ln_f_weight),
                               gradients.tensor(ln_f_bias), pass.engine.workspace());
}

}  // namespace tranche::models
