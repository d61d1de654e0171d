#include "kernels/reference/attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace tranche::kernels::reference {

namespace {

/// The offsets of one head's parts in the packed tensors.
struct Head {
  std::size_t time, width, head_width, batch, head;
  double scale;

  /// Index of element `c` of part 0 (query), 1 (key) or 2 (value) at time `t`.
  std::size_t packed(std::size_t part, std::size_t t, std::size_t c) const {
    return (batch * time + t) * 3 * width + part * width + head * head_width + c;
  }
  std::size_t out(std::size_t t, std::size_t c) const {
    return (batch * time + t) * width + head * head_width + c;
  }
};

Head head_at(const AttentionShape& shape, std::int64_t batch, std::int64_t head) {
  const std::int64_t head_width = shape.width / shape.heads;
  return {static_cast<std::size_t>(shape.time), static_cast<std::size_t>(shape.width),
          static_cast<std::size_t>(head_width), static_cast<std::size_t>(batch),
          static_cast<std::size_t>(head),       1.0 / std::sqrt(static_cast<double>(head_width))};
}

/// Probabilities of one query over keys 0 ... query; returns log(sum(exp(score))).
double probabilities(const Head& at, std::span<const double> query_key_value, std::size_t query,
                     std::vector<double>& result) {
  result.assign(query + 1, 0.0);
  for (std::size_t key = 0; key <= query; ++key) {
    for (std::size_t c = 0; c < at.head_width; ++c) {
      result[key] += query_key_value[at.packed(0, query, c)] * query_key_value[at.packed(1, key, c)];
    }
    result[key] *= at.scale;
  }
  const double maximum = *std::max_element(result.begin(), result.end());
  double sum = 0;
  for (double& score : result) sum += (score = std::exp(score - maximum));
  for (double& score : result) score /= sum;
  return maximum + std::log(sum);
}

}  // namespace

void attention_forward(const AttentionShape& shape, std::span<const double> query_key_value,
                       std::span<const double> keep_scale, std::span<double> out,
                       std::span<double> log_sum_exp) {
  std::vector<double> probability;
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    for (std::int64_t h = 0; h < shape.heads; ++h) {
      const Head at = head_at(shape, b, h);
      const auto row = static_cast<std::size_t>(b * shape.heads + h) * at.time;
      for (std::size_t query = 0; query < at.time; ++query) {
        log_sum_exp[row + query] = probabilities(at, query_key_value, query, probability);
        for (std::size_t c = 0; c < at.head_width; ++c) {
          double sum = 0;
          for (std::size_t key = 0; key <= query; ++key) {
            const double keep = keep_scale.empty() ? 1.0 : keep_scale[(row + query) * at.time + key];
            sum += probability[key] * keep * query_key_value[at.packed(2, key, c)];
          }
          out[at.out(query, c)] = sum;
        }
      }
    }
  }
}

void attention_backward(const AttentionShape& shape, std::span<const double> d_out,
                        std::span<const double> query_key_value, std::span<const double> keep_scale,
                        std::span<double> d_query_key_value) {
  std::fill(d_query_key_value.begin(), d_query_key_value.end(), 0.0);
  std::vector<double> probability, d_probability;
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    for (std::int64_t h = 0; h < shape.heads; ++h) {
      const Head at = head_at(shape, b, h);
      const auto row = static_cast<std::size_t>(b * shape.heads + h) * at.time;
      for (std::size_t query = 0; query < at.time; ++query) {
        probabilities(at, query_key_value, query, probability);
        d_probability.assign(query + 1, 0.0);
        double weighted = 0;  // sum over keys of probability * d_probability
        for (std::size_t key = 0; key <= query; ++key) {
          const double keep = keep_scale.empty() ? 1.0 : keep_scale[(row + query) * at.time + key];
          for (std::size_t c = 0; c < at.head_width; ++c) {
            const double gradient = d_out[at.out(query, c)];
            d_probability[key] += gradient * keep * query_key_value[at.packed(2, key, c)];
            d_query_key_value[at.packed(2, key, c)] += gradient * keep * probability[key];
          }
          weighted += probability[key] * d_probability[key];
        }
        for (std::size_t key = 0; key <= query; ++key) {
          const double d_score = probability[key] * (d_probability[key] - weighted) * at.scale;
          for (std::size_t c = 0; c < at.head_width; ++c) {
            d_query_key_value[at.packed(0, query, c)] += d_score * query_key_value[at.packed(1, key, c)];
            d_query_key_value[at.packed(1, key, c)] += d_score * query_key_value[at.packed(0, query, c)];
          }
        }
      }
    }
  }
}

}  // namespace tranche::kernels::reference
