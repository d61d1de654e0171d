#include "tranche/config/lora.h"

#include <fmt/core.h>

#include <cmath>

namespace tranche {

namespace {

constexpr std::int64_t largest_rank = 65'536;

}  // namespace

float LoraConfig::scale() const {
  const auto r = static_cast<double>(rank);
  return static_cast<float>(effective_alpha() / (rank_scaled ? std::sqrt(r) : r));
}

std::string LoraConfig::problem() const {
  if (rank < 0 || rank > largest_rank)
    return fmt::format("tranche.lora.rank: {} is not between 0 (no adapters) and {}", rank, largest_rank);
  if (!(alpha >= 0) || !std::isfinite(alpha))
    return fmt::format("tranche.lora.alpha: {} is not a positive number", alpha);
  if (!(dropout >= 0 && dropout < 1))
    return fmt::format("tranche.lora.dropout: {} is not in [0, 1)", dropout);
  if (rank > 0 && targets.empty()) return "tranche.lora.targets: names no linear layer";
  for (const std::string& target : targets) {
    if (target.empty()) return "tranche.lora.targets: has an empty name";
  }
  return {};
}

}  // namespace tranche
