#pragma once
/// GPT-2 with hand-written backward, under the engine.

#include <cstdint>
#include <span>
#include <vector>

#include "tranche/core/tensor_view.h"
#include "tranche/engine/model_spec.h"
#include "tranche/models/gpt_config.h"

namespace tranche {

class Engine;

namespace models {

/// A micro-batch of token sequences.
struct TokenBatch {
  ConstTensorView tokens;   ///< int32 [batch, time] in device memory, in [0, vocabulary): not checked here
  ConstTensorView targets;  ///< int32 [batch, time] in device memory; kernels::ignored_label is left out
  std::span<const std::int64_t> samples;  ///< global index of each sequence, host memory; keys dropout
};

/// The GPT-2 architecture exactly: pre-norm blocks, learned positions, GELU in its tanh form, tied head, and
/// the tensor names of Hugging Face's GPT2LMHeadModel. Holds no weights: those are the engine's. Units:
/// "embedding" (wte, wpe, ln_f), then "h.0", "h.1", ...; under stage 3 each is gathered twice and reduced
/// once a micro-batch (some three times where checkpoint_every exceeds the depth, see forward_backward).
class Gpt {
 public:
  /// Throws ConfigurationError when the configuration does not fit together.
  explicit Gpt(GptConfig config);
  const GptConfig& config() const noexcept { return config_; }

  /// The model that the Engine is made with. `sequence` is the length of the training sequences, for
  /// tokens_per_sample and flops_per_token. Throws ConfigurationError when it is longer than the model
  /// allows.
  static ModelSpec spec(const GptConfig& config, std::int64_t sequence);

  /// One whole micro-batch: calls Engine::begin_micro_batch(), forward, backward, reduce() and
  /// end_micro_batch(). Call it Config::accumulation_steps times, then Engine::step(), whose result has the
  /// loss. Dropout is keyed by (Config::seed, engine step, sample, site, element). With
  /// Config::activation_checkpointing only the input of every checkpoint_every-th block is saved and blocks
  /// are recomputed in backward, group by group, with the same bits. A block is gathered twice a micro-batch
  /// when its group is no larger than Config::depth, so that its units stay gathered between recomputation
  /// and backward; in a larger group, three times but for its last block. Throws InvalidArgument on shapes,
  /// ConfigurationError on a sequence that is too long.
  void forward_backward(Engine& engine, const TokenBatch& batch) const;
  /// One micro-batch of loss, without dropout, between Engine::begin_evaluation and end_evaluation.
  void evaluate(Engine& engine, const TokenBatch& batch) const;

  /// Logits (fp32, one for each of the vocabulary) of the token after `tokens`, at most the last `positions`
  /// of which are seen. Collective; between steps. It opens an InferenceScope itself, so not inside one.
  /// Zeros on the meta device.
  std::vector<float> next_token_logits(Engine& engine, std::span<const std::int32_t> tokens) const;
  /// softmax(logits / temperature) of the same, in fp64; temperature > 0.
  std::vector<double> next_token_probabilities(Engine& engine, std::span<const std::int32_t> tokens,
                                               double temperature = 1) const;

 private:
  GptConfig config_;
};

}  // namespace models
}  // namespace tranche
