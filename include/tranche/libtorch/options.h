#pragma once
/// The arguments of a Trainer: options, and the loss of a micro-batch.

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tranche/config/config.h"
#include "tranche/core/error.h"
#include "tranche/engine/training_rule.h"

namespace tranche::libtorch {

/// The loss of a micro-batch.
struct Loss {
  at::Tensor sum;           ///< one element: the sum of the losses of tokens (samples, pixels ...)
  std::int64_t tokens = 0;  ///< number of added losses

  /// Makes the sum from a mean over `count` elements, which torch's loss functions return.
  static Loss of_mean(const at::Tensor& mean, std::int64_t count) {
    return {mean.to(at::kFloat) * static_cast<double>(count), count};
  }
};

/// Two-dimensional parameters that are hidden matrices; Muon updates each of them whole.
struct MatrixNames {
  std::string pattern;   ///< pattern of their names, in which '*' matches any text
  int side_by_side = 1;  ///< equal matrices beside each other along the outputs: 3 for a fused query, key and
                         ///< value
};

struct TrainerOptions {
  /// Tokens in one sample, for the scale of the loss's gradient (see ModelSpec).
  std::int64_t tokens_per_sample = 1;
  /// Names of units whose forward runs again in backward instead of saving its activations; '*' matches any
  /// text ("layers.*"). If the configuration asks for activation_checkpointing, units of Units<> are
  /// recomputed as well.
  std::vector<std::string> recompute = {};
  /// The hidden matrices among the parameters. The first entry that matches a name counts. Muon leaves
  /// parameters without an entry (embeddings, heads) to AdamW.
  std::vector<MatrixNames> matrices = {};
  /// Copies rank 0's buffers (running means ...) to all ranks at the beginning of every step and evaluation.
  /// Otherwise each rank has its own.
  bool broadcast_buffers = false;
  double flops_per_token = 0;  ///< for reports
  /// Replaces runtime.config(), which only a Runtime made by from_config() has.
  std::optional<Config> config = std::nullopt;
  EngineOptions engine = {};
};

namespace detail {

/// Throws for settings that the library's own models support and this adapter does not.
inline void check(const Config& config) {
  const std::string cannot = ": Tranche's own models honour it, modules of LibTorch cannot; leave it out";
  if (config.offload.activations) {
    throw ConfigurationError("activation_checkpointing.cpu_checkpointing" + cannot);
  }
  if (config.checkpoint_every != 1) {
    throw ConfigurationError("tranche.checkpoint_every" + cannot);
  }
  if (config.lora.any()) throw ConfigurationError("tranche.lora" + cannot);
  if (config.vocabulary_chunk != 0) throw ConfigurationError("tranche.vocabulary_chunk" + cannot);
}

inline void check(const Loss& loss) {
  if (loss.sum.defined() && loss.sum.numel() == 1) return;
  throw InvalidArgument("the loss of a micro-batch has " +
                        std::to_string(loss.sum.defined() ? loss.sum.numel() : 0) +
                        " elements; it is one, the sum over its tokens");
}

}  // namespace detail

}  // namespace tranche::libtorch
