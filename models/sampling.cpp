#include "tranche/models/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "tranche/core/random.h"

namespace tranche::models {

namespace {

/// Keeps the k largest logits, the first of equal ones; the others become minus infinity.
std::vector<float> keep_largest(std::span<const float> logits, std::int64_t k) {
  std::vector<std::int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto before = [&](std::int32_t a, std::int32_t b) {
    const float x = logits[static_cast<std::size_t>(a)], y = logits[static_cast<std::size_t>(b)];
    return x != y ? x > y : a < b;
  };
  std::nth_element(order.begin(), order.begin() + (k - 1), order.end(), before);
  std::vector<float> kept(logits.size(), -std::numeric_limits<float>::infinity());
  for (std::int64_t i = 0; i < k; ++i) {
    const auto token = static_cast<std::size_t>(order[static_cast<std::size_t>(i)]);
    kept[token] = logits[token];
  }
  return kept;
}

/// Keeps the most probable tokens, the first of equal ones, that add up to `share` of the sum; the others
/// become zero. Returns the remaining sum.
double keep_share(std::vector<double>& weights, double sum, double share) {
  std::vector<std::size_t> order(weights.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return weights[a] > weights[b]; });
  double kept = 0;
  for (const std::size_t token : order) {
    if (kept >= share * sum) {
      weights[token] = 0;
    } else {
      kept += weights[token];
    }
  }
  return kept;
}

}  // namespace

std::int32_t draw_token(std::span<const float> logits, const SamplingOptions& options, std::int64_t position,
                        std::int64_t text) {
  const auto likeliest = std::max_element(logits.begin(), logits.end());
  if (options.temperature == 0) return static_cast<std::int32_t>(likeliest - logits.begin());
  std::vector<float> kept;
  if (options.top_k > 0 && options.top_k < static_cast<std::int64_t>(logits.size())) {
    kept = keep_largest(logits, options.top_k);
    logits = kept;
  }
  const double highest = *likeliest;  // the highest of all logits, which is always kept
  std::vector<double> weights(logits.size());
  double sum = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    weights[i] = std::exp((static_cast<double>(logits[i]) - highest) / options.temperature);
    sum += weights[i];
  }
  if (options.top_p < 1) sum = keep_share(weights, sum, options.top_p);
  const double draw =
      sum * random_uniform({options.seed, RandomPurpose::sampling, static_cast<std::uint64_t>(text)},
                           static_cast<std::uint64_t>(position));
  double passed = 0;
  std::size_t chosen = 0;  // the last probable token, if rounding puts the draw above the sum
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] <= 0) continue;
    chosen = i;
    passed += weights[i];
    if (draw < passed) break;
  }
  return static_cast<std::int32_t>(chosen);
}

}  // namespace tranche::models
