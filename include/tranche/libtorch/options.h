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
  at::Tensor sum;           ///< of one element: the sum of the losses of tokens (samples, pixels ...)
  std::int64_t tokens = 0;  ///< how many were added

  /// Makes the sum from a loss that is a mean over `count` elements, as torch's loss functions return it.
  static Loss of_mean(const at::Tensor& mean, std::int64_t count) {
    return {mean.to(at::kFloat) * static_cast<double>(count), count};
  }
};

/// Parameters of two dimensions that are hidden matrices, which Muon takes whole.
struct MatrixNames {
  std::string pattern;   ///< of their names, with '*' for any text
  int side_by_side = 1;  ///< matrices of equal size along the outputs: 3 of a fused query, key and value
};

struct TrainerOptions {
  /// See ModelSpec: tokens in one sample, for the loss gradient's scale.
  std::int64_t tokens_per_sample = 1;
  /// Units whose forward runs again in backward, in place of keeping what it computed: names, with '*' for
  /// any text ("layers.*"). Those of Units<> too where the configuration asks for activation_checkpointing.
  std::vector<std::string> recompute = {};
  /// The hidden matrices among the parameters. The first of these that a name matches counts, and Muon leaves
  /// all that none names (embeddings, heads) to AdamW.
  std::vector<MatrixNames> matrices = {};
  /// Every step and evaluation begins with rank 0's buffers (running means ...) on all ranks. Otherwise each
  /// rank has its own.
  bool broadcast_buffers = false;
  double flops_per_token = 0;  ///< for reports
  /// In place of runtime.config(), which a Runtime that was not made by from_config() has not.
  std::optional<Config> config = std::nullopt;
  EngineOptions engine = {};
};

namespace detail {

/// Refuses settings that the library's own models honour and the adapter cannot.
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
