#include "tools/evaluation.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "tranche/core/random.h"

namespace tranche::tools {

std::string sample_text(Engine& engine, const models::LanguageModel& model, std::string_view prompt,
                        std::int64_t count, std::int64_t context, double temperature, std::uint64_t seed) {
  std::vector<std::int32_t> tokens;
  for (const char c : prompt) tokens.push_back(static_cast<unsigned char>(c));
  std::string text;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::vector<double> probabilities = model.next_token_probabilities(
        engine, std::span(tokens).last(std::min(tokens.size(), static_cast<std::size_t>(context))),
        temperature);
    const double draw = random_uniform({seed, RandomPurpose::sampling, 0}, static_cast<std::uint64_t>(i));
    double sum = 0;
    std::size_t chosen = 0;
    // Bytes only; the last one with any probability when rounding leaves the draw above the sum.
    for (std::size_t k = 0; k < std::min<std::size_t>(probabilities.size(), 256); ++k) {
      if (probabilities[k] <= 0) continue;
      chosen = k;
      sum += probabilities[k];
      if (draw < sum) break;
    }
    tokens.push_back(static_cast<std::int32_t>(chosen));
    text.push_back(static_cast<char>(static_cast<unsigned char>(chosen)));
  }
  return text;
}

}  // namespace tranche::tools
