#pragma once
/// Draws the next token from a model's logits.

#include <cstdint>
#include <span>
#include <vector>

namespace tranche::models {

struct SamplingOptions {
  double temperature = 1;  ///< 0: always the most probable token; of equal ones the first
  std::int64_t top_k = 0;  ///< draw from so many most probable tokens, the first of equals; 0: all
  /// Draw only from the smallest set of most probable tokens whose probabilities, after top_k, add up to at
  /// least this; 1: all (nucleus sampling, Holtzman et al. 2020).
  double top_p = 1;
  std::uint64_t seed = 0;
};

/// Draws a token below logits.size() from softmax(logits / temperature) in fp64. The random number is a
/// function of seed, `text` (the prompt's number) and `position` (the new token's), so that it is the same on
/// all ranks and in every run.
std::int32_t draw_token(std::span<const float> logits, const SamplingOptions& options, std::int64_t position,
                        std::int64_t text = 0);

}  // namespace tranche::models
