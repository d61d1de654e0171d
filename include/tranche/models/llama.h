#pragma once
/// The Llama family with a hand-written backward, for the engine.

#include "tranche/models/language_model.h"
#include "tranche/models/llama_config.h"

namespace tranche::models {

/// LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM as in transformers: pre-norm
/// blocks of RMSNorm, rotary positions, grouped attention and SwiGLU, with the same tensor names and shapes
/// (nn.Linear stores [out, in]). Units: "embedding" (embed_tokens; with a tied head also norm), "layers.0",
/// "layers.1", ..., and "head" (norm, lm_head) unless it is tied. Rows may contain several documents, and
/// tokens may have explicit positions.
class Llama final : public LanguageModel {
 public:
  /// Throws ConfigurationError for an inconsistent configuration.
  explicit Llama(LlamaConfig config);
  const LlamaConfig& config() const noexcept { return config_; }

  std::string architecture() const override { return std::string(config_.architecture()); }
  ModelShape shape() const override;
  std::string to_json() const override { return config_.to_json(); }
  std::string describe() const override;
  std::string tensor_of(std::string_view stored) const override;
  double block_operations(std::int64_t sequence) const override;
  double skipped_operations() const override;

  /// The gradients of query and key norms are sums over heads, which are summed by rank.
  bool chain_sums() const override { return true; }
  bool sequence_parts() const override { return true; }
  std::vector<std::string> tensor_dimensions() const override {
    return {"heads", "key_value_heads", "inner", "vocabulary"};
  }
  std::vector<std::string> whole_dimensions() const override { return {"inner", "vocabulary"}; }
  UnitSpec embedding_unit() const override;
  UnitSpec block_unit(std::int64_t block) const override;
  UnitSpec head_unit() const override;
  bool takes_documents() const override { return true; }
  std::optional<CacheHeads> cache_heads() const override;
  StepTensors acquire_tables(const Pass& pass) const override;
  void embedding_forward(const Pass& pass, const GatheredUnit& unit, const ConstTensorView& tokens,
                         const TensorView& out) const override;
  void embedding_backward(const Pass& pass, const UnitGradients& gradients, const ConstTensorView& tokens,
                          const TensorView& gradient) const override;
  /// Saves 3 * width + 2 * (heads + key_value_heads) * head_dim + 2 * inner elements a token, and the
  /// statistics of norms and softmax. Queries and keys are saved after rotation. If they have norms, they are
  /// saved before these, and backward applies norm and rotation again in scratch memory. block_backward()
  /// overwrites the activations of the MLP.
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
  LlamaConfig config_;
};

}  // namespace tranche::models
