#pragma once
/// GPT-2 with a hand-written backward, for the engine.

#include "tranche/models/gpt_config.h"
#include "tranche/models/language_model.h"

namespace tranche::models {

/// Exactly the GPT-2 architecture: pre-norm blocks, learned positions, GELU in its tanh form, tied head, and
/// the tensor names of Hugging Face's GPT2LMHeadModel. Units: "embedding" (wte, wpe, ln_f), then "h.0",
/// "h.1", ...
class Gpt final : public LanguageModel {
 public:
  /// Throws ConfigurationError for an inconsistent configuration.
  explicit Gpt(GptConfig config);
  const GptConfig& config() const noexcept { return config_; }

  using LanguageModel::spec;
  /// The same without a model: LanguageModel::spec.
  static ModelSpec spec(const GptConfig& config, std::int64_t sequence);

  std::string architecture() const override { return "GPT2LMHeadModel"; }
  ModelShape shape() const override;
  std::string to_json() const override { return config_.to_json(); }
  std::string describe() const override;
  std::string tensor_of(std::string_view stored) const override;
  double block_operations(std::int64_t sequence) const override;
  double skipped_operations() const override;

  bool chain_sums() const override { return true; }
  bool sequence_parts() const override { return true; }
  std::vector<std::string> tensor_dimensions() const override { return {"heads", "inner", "vocabulary"}; }
  std::vector<std::string> whole_dimensions() const override { return {"inner", "vocabulary"}; }
  UnitSpec embedding_unit() const override;
  UnitSpec block_unit(std::int64_t block) const override;
  void embedding_forward(const Pass& pass, const GatheredUnit& unit, const ConstTensorView& tokens,
                         const TensorView& out) const override;
  void embedding_backward(const Pass& pass, const UnitGradients& gradients, const ConstTensorView& tokens,
                          const TensorView& gradient) const override;
  std::optional<CacheHeads> cache_heads() const override;
  StepTensors acquire_block_activations(const Pass& pass) const override;
  void block_forward(const Pass& pass, std::int64_t block, const GatheredUnit& unit,
                     const ConstTensorView& input, const StepTensors& activations,
                     const TensorView* output) const override;
  void block_backward(const Pass& pass, std::int64_t block, const GatheredUnit& unit,
                      WeightGradients& weights, const ConstTensorView& input, const StepTensors& activations,
                      const TensorView& gradient) const override;
  void final_norm_forward(const Pass& pass, const GatheredUnit& unit, const ConstTensorView& x,
                          const FinalNorm& norm) const override;
  void final_norm_backward(const Pass& pass, const GatheredUnit& unit, const UnitGradients& gradients,
                           const TensorView& d_normed, const ConstTensorView& x, const FinalNorm& norm,
                           const TensorView& d_x) const override;

 private:
  GptConfig config_;
};

}  // namespace tranche::models
