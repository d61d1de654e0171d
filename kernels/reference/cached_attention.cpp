#include "kernels/reference/cached_attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace tranche::kernels::reference {

void attention_with_cache(const CachedAttentionShape& shape, std::int64_t length,
                          std::span<const double> query, std::span<const double> keys,
                          std::span<const double> values, std::span<double> out) {
  std::fill(out.begin(), out.end(), 0.0);
  if (length == 0) return;
  const double scale = shape.scale > 0 ? shape.scale : 1.0 / std::sqrt(static_cast<double>(shape.head_width));
  const auto place = [](std::int64_t index) { return static_cast<std::size_t>(index); };
  for (std::int64_t t = 0; t < shape.time; ++t) {
    const std::int64_t position = length - shape.time + t;
    const std::int64_t first = shape.window > 0 ? std::max<std::int64_t>(0, position - shape.window + 1) : 0;
    for (std::int64_t head = 0; head < shape.heads; ++head) {
      const std::int64_t of_query = (t * shape.heads + head) * shape.head_width;
      const std::int64_t of_keys =
          head / (shape.heads / shape.key_value_heads) * shape.capacity * shape.head_width;
      std::vector<double> weights;
      double highest = -INFINITY, sum = 0;
      for (std::int64_t key = first; key <= position; ++key) {
        double score = 0;
        for (std::int64_t c = 0; c < shape.head_width; ++c) {
          score += query[place(of_query + c)] * keys[place(of_keys + key * shape.head_width + c)];
        }
        weights.push_back(score * scale);
        highest = std::max(highest, weights.back());
      }
      for (double& weight : weights) sum += weight = std::exp(weight - highest);
      for (std::int64_t key = first; key <= position; ++key) {
        const double probability = weights[place(key - first)] / sum;
        for (std::int64_t c = 0; c < shape.head_width; ++c) {
          out[place(of_query + c)] += probability * values[place(of_keys + key * shape.head_width + c)];
        }
      }
    }
  }
}

}  // namespace tranche::kernels::reference
