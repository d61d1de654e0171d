#include "kernels/reference/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "tranche/kernels/cross_entropy.h"

namespace tranche::kernels::reference {

namespace {

struct RowStatistics {
  double maximum = 0;
  double sum = 0;
};

RowStatistics row_statistics(std::span<const double> row) {
  RowStatistics statistics{*std::max_element(row.begin(), row.end()), 0};
  for (double logit : row) statistics.sum += std::exp(logit - statistics.maximum);
  return statistics;
}

}  // namespace

CrossEntropyResult cross_entropy_forward(std::int64_t vocabulary, std::span<const double> logits,
                                         std::span<const std::int32_t> targets) {
  const auto columns = static_cast<std::size_t>(vocabulary);
  CrossEntropyResult result;
  for (std::size_t r = 0; r < targets.size(); ++r) {
    if (targets[r] == ignored_label) continue;
    const auto row = logits.subspan(r * columns, columns);
    const RowStatistics statistics = row_statistics(row);
    result.loss_sum +=
        std::log(statistics.sum) + statistics.maximum - row[static_cast<std::size_t>(targets[r])];
    ++result.tokens;
  }
  return result;
}

void cross_entropy_backward(std::int64_t vocabulary, std::span<const double> logits,
                            std::span<const std::int32_t> targets, double scale, std::span<double> d_logits) {
  const auto columns = static_cast<std::size_t>(vocabulary);
  for (std::size_t r = 0; r < targets.size(); ++r) {
    const auto row = logits.subspan(r * columns, columns);
    const auto gradient = d_logits.subspan(r * columns, columns);
    if (targets[r] == ignored_label) {
      std::fill(gradient.begin(), gradient.end(), 0.0);
      continue;
    }
    const RowStatistics statistics = row_statistics(row);
    for (std::size_t c = 0; c < columns; ++c) {
      const double hit = static_cast<std::size_t>(targets[r]) == c ? 1.0 : 0.0;
      gradient[c] = (std::exp(row[c] - statistics.maximum) / statistics.sum - hit) * scale;
    }
  }
}

}  // namespace tranche::kernels::reference
