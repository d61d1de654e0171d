#pragma once
/// The next token from a model's logits.

#include <cstdint>
#include <span>
#include <vector>

namespace tranche::models {

struct SamplingOptions {
  double temperature = 1;  ///< 0: always the likeliest, the first of equals
  std::int64_t top_k = 0;  ///< 0: all tokens; else so many of the likeliest, the first of equals
  /// The least of the likeliest tokens whose probabilities, after top_k, add up to this at least; 1: all
  /// (nucleus sampling, Holtzman et al. 2020).
  double top_p = 1;
  std::uint64_t seed = 0;
};

/// A token below logits.size(), drawn from softmax(logits / temperature) in fp64 by a random number that is a
/// function of seed, `text` (the number of the prompt) and `position` (that of the new token): the same on
/// all ranks and in every run.
std::int32_t draw_token(std::span<const float> logits, const SamplingOptions& options, std::int64_t position,
                        std::int64_t text = 0);

}  // namespace tranche::models
