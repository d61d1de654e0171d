#include "tranche/models/llama.h"

#include <fmt/format.h>

#include <utility>

#include "models/chained_sums.h"
#include "models/drawn_weights.h"
#include "tranche/engine/engine.h"
#include "tranche/kernels/embedding.h"
#include "tranche/kernels/rms_norm.h"
#include "tranche/kernels/rope.h"
#include "tranche/models/context_rows.h"
#include "tranche/models/key_value_cache.h"
#include "tranche/models/tensor_rows.h"

namespace tranche::models {

namespace {

constexpr const char *table_name = "model.embed_tokens.weight", *norm_name = "model.norm.weight",
                     *head_name = "lm_head.weight";
constexpr int embedding_table = 0;

/// Index of the final norm's weight in its unit: after the table if the head is tied, else before lm_head.
int final_norm_index(const LlamaConfig& config) {
  return config.tied ? 1 : 0;
}

}  // namespace

Llama::Llama(LlamaConfig config) : config_(std::move(config)) {
  config_.validate("model configuration");
}

ModelShape Llama::shape() const {
  return {.layers = config_.layers,
          .width = config_.width,
          .vocabulary = config_.vocabulary,
          .positions = config_.positions,
          .tied_head = config_.tied,
          .head_weight = config_.tied ? embedding_table : 1};
}

std::string Llama::describe() const {
  const char* norms = config_.query_key_norm() ? ", norms of query and key" : "";
  const std::string window = config_.window > 0 ? fmt::format(", window {}", config_.window) : "";
  return fmt::format("{} of {} layers, width {}, {} heads of {} ({} of keys and values), vocabulary {}{}{}{}",
                     architecture(), config_.layers, config_.width, config_.heads, config_.head_dim,
                     config_.key_value_heads, config_.vocabulary, config_.tied ? ", head tied" : "", norms,
                     window);
}

std::string Llama::tensor_of(std::string_view stored) const {
  // Versions of transformers before 4.31 saved the frequencies with the weights.
  if (stored.ends_with(".rotary_emb.inv_freq")) return "";
  return std::string(stored);
}

double Llama::block_operations(std::int64_t sequence) const {
  const double head = 2.0 * static_cast<double>(config_.vocabulary) * static_cast<double>(config_.width);
  return (config_.flops_per_token(sequence) / 3 - head) / static_cast<double>(config_.layers);
}

double Llama::skipped_operations() const {
  return 2.0 * static_cast<double>(config_.width) * static_cast<double>(config_.inner);
}

UnitSpec Llama::embedding_unit() const {
  UnitSpec unit{
      .name = "embedding",
      .tensors = {
          {table_name, {config_.vocabulary, config_.width}, drawn_weights(config_.initializer_range)}}};
  unit.tensors.front().dimensions = {{"vocabulary"}, {"width"}};
  if (config_.tied) {
    unit.tensors.front().aliases = {head_name};
    unit.tensors.front().linear = LinearLayout::out_in;
    unit.tensors.push_back({.name = norm_name,
                            .shape = {config_.width},
                            .initializer = Initializer::ones(),
                            .uses = {head_use}});
    unit.uses_per_micro_batch = 2;
  }
  return unit;
}

UnitSpec Llama::head_unit() const {
  return {.name = "head",
          .tensors = {{norm_name, {config_.width}, Initializer::ones()},
                      {.name = head_name,
                       .shape = {config_.vocabulary, config_.width},
                       .initializer = drawn_weights(config_.initializer_range),
                       .linear = LinearLayout::out_in,
                       .dimensions = {{"vocabulary"}, {"width"}}}}};
}

std::optional<CacheHeads> Llama::cache_heads() const {
  return CacheHeads{config_.key_value_heads, config_.head_dim};
}

StepTensors Llama::acquire_tables(const Pass& pass) const {
  StepTensors tables(pass.engine, Category::activations, "rotary positions",
                     {{DataType::float32, {pass.rows(), config_.head_dim}}});
  const std::vector<float> frequencies =
      kernels::rope_frequencies(config_.head_dim, config_.rope_theta, config_.rope);
  for (int run = 0; run < pass.runs(); ++run) {
    const TensorView rows = rows_of_run(pass, tables[0], run);
    const ConstTensorView positions = pass.positions
                                          ? rows_of_run(pass, *pass.positions, run).reshaped({rows.shape[0]})
                                          : ConstTensorView{};
    kernels::rope_table(pass.engine.compute_stream(), frequencies, positions, pass.time, rows,
                        pass.first_of_run(run));
  }
  return tables;
}

void Llama::embedding_forward(const Pass& pass, const GatheredUnit& unit, const ConstTensorView& tokens,
                              const TensorView& out) const {
  PartialRows partial(pass, out);
  kernels::embedding_forward(
      pass.engine.compute_stream(), tokens, pass.own_tokens(unit.tensor(embedding_table)), {},
      partial.view().reshaped({pass.batch, pass.time, config_.width}), {}, pass.first_token());
  partial.scatter(unit.spec().name);
}

void Llama::embedding_backward(const Pass& pass, const UnitGradients& gradients,
                               const ConstTensorView& tokens, const TensorView& gradient) const {
  if (!gradients.wanted(embedding_table)) return;
  const GatheredRows rows(pass, gradients.spec().name, gradient);
  kernels::embedding_backward(pass.engine.compute_stream(), tokens,
                              rows.view().reshaped({pass.batch, pass.time, config_.width}),
                              pass.own_tokens(gradients.tensor(embedding_table)), {}, pass.first_token());
}

void Llama::final_norm_forward(const Pass& pass, const GatheredUnit& unit, const ConstTensorView& x,
                               const FinalNorm& norm) const {
  kernels::rms_norm_forward(pass.engine.compute_stream(), x, unit.tensor(final_norm_index(config_)),
                            config_.norm_epsilon, norm.normed, norm.rstd);
}

void Llama::final_norm_backward(const Pass& pass, const GatheredUnit& unit, const UnitGradients& gradients,
                                const TensorView& d_normed, const ConstTensorView& x, const FinalNorm& norm,
                                const TensorView& d_x) const {
  norm_backward(pass, unit, gradients, {final_norm_index(config_)}, d_normed, x, {}, norm.rstd, false, d_x);
}

}  // namespace tranche::models
