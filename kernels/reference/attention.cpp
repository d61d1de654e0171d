#include "kernels/reference/attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace tranche::kernels::reference {

namespace {

/// One query head of one batch entry, with the keys and values that it uses.
struct Head {
  std::size_t time, width, first_row, first_query_column, first_key_column, out_stride;
  double scale;

  template <class T>
  T& query(const HeadRows<T>& rows, std::size_t t, std::size_t c) const {
    return rows.elements[(first_row + t) * static_cast<std::size_t>(rows.stride) + first_query_column + c];
  }
  /// Element (t, c) of keys or of values.
  template <class T>
  T& key(const HeadRows<T>& rows, std::size_t t, std::size_t c) const {
    return rows.elements[(first_row + t) * static_cast<std::size_t>(rows.stride) + first_key_column + c];
  }
  std::size_t out(std::size_t t, std::size_t c) const {
    return (first_row + t) * out_stride + first_query_column + c;
  }
};

Head head_at(const AttentionShape& shape, std::int64_t batch, std::int64_t head) {
  const std::int64_t key_head = head / (shape.heads / shape.key_value_heads);
  const auto size = [](std::int64_t count) { return static_cast<std::size_t>(count); };
  return {size(shape.time),
          size(shape.head_width),
          size(batch * shape.time),
          size(head * shape.head_width),
          size(key_head * shape.head_width),
          size(shape.heads * shape.head_width),
          shape.scale > 0 ? shape.scale : 1.0 / std::sqrt(static_cast<double>(shape.head_width))};
}

/// The first key that a query sees.
std::size_t first_key(const AttentionShape& shape, std::int64_t batch, std::size_t query) {
  const auto t = static_cast<std::int64_t>(query);
  std::int64_t first = 0;
  if (shape.window > 0) first = std::max(first, t - shape.window + 1);
  if (!shape.document_begin.empty()) {
    const std::int32_t begin = shape.document_begin[static_cast<std::size_t>(batch * shape.time + t)];
    first = std::max<std::int64_t>(first, begin);
  }
  return static_cast<std::size_t>(first);
}

/// The probabilities of one query over keys 0 ... query, zero before `first`; returns log(sum(exp(score))).
double probabilities(const Head& at, const QueryKeyValue<const double>& operands, std::size_t first,
                     std::size_t query, std::vector<double>& result) {
  result.assign(query + 1, 0.0);
  for (std::size_t key = first; key <= query; ++key) {
    for (std::size_t c = 0; c < at.width; ++c) {
      result[key] += at.query(operands.query, query, c) * at.key(operands.key, key, c);
    }
    result[key] *= at.scale;
  }
  const auto seen = result.begin() + static_cast<std::ptrdiff_t>(first);
  const double maximum = *std::max_element(seen, result.end());
  double sum = 0;
  for (std::size_t key = first; key <= query; ++key) sum += (result[key] = std::exp(result[key] - maximum));
  for (double& score : result) score /= sum;
  return maximum + std::log(sum);
}

}  // namespace

void attention_forward(const AttentionShape& shape, const QueryKeyValue<const double>& operands,
                       std::span<const double> keep_scale, std::span<double> out,
                       std::span<double> log_sum_exp) {
  std::vector<double> probability;
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    for (std::int64_t h = 0; h < shape.heads; ++h) {
      const Head at = head_at(shape, b, h);
      const auto row = static_cast<std::size_t>(b * shape.heads + h) * at.time;
      for (std::size_t query = 0; query < at.time; ++query) {
        const std::size_t first = first_key(shape, b, query);
        log_sum_exp[row + query] = probabilities(at, operands, first, query, probability);
        for (std::size_t c = 0; c < at.width; ++c) {
          double sum = 0;
          for (std::size_t key = first; key <= query; ++key) {
            const double keep = keep_scale.empty() ? 1.0 : keep_scale[(row + query) * at.time + key];
            sum += probability[key] * keep * at.key(operands.value, key, c);
          }
          out[at.out(query, c)] = sum;
        }
      }
    }
  }
}

void attention_backward(const AttentionShape& shape, std::span<const double> d_out,
                        const QueryKeyValue<const double>& operands, std::span<const double> keep_scale,
                        const QueryKeyValue<double>& gradients) {
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    for (std::int64_t h = 0; h < shape.heads; ++h) {
      const Head at = head_at(shape, b, h);
      for (std::size_t t = 0; t < at.time; ++t) {
        for (std::size_t c = 0; c < at.width; ++c) {
          at.query(gradients.query, t, c) = at.key(gradients.key, t, c) = at.key(gradients.value, t, c) = 0;
        }
      }
    }
  }
  std::vector<double> probability, d_probability;
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    for (std::int64_t h = 0; h < shape.heads; ++h) {
      const Head at = head_at(shape, b, h);
      const auto row = static_cast<std::size_t>(b * shape.heads + h) * at.time;
      for (std::size_t query = 0; query < at.time; ++query) {
        const std::size_t first = first_key(shape, b, query);
        probabilities(at, operands, first, query, probability);
        d_probability.assign(query + 1, 0.0);
        double weighted = 0;  // sum over keys of probability * d_probability
        for (std::size_t key = first; key <= query; ++key) {
          const double keep = keep_scale.empty() ? 1.0 : keep_scale[(row + query) * at.time + key];
          for (std::size_t c = 0; c < at.width; ++c) {
            const double gradient = d_out[at.out(query, c)];
            d_probability[key] += gradient * keep * at.key(operands.value, key, c);
            at.key(gradients.value, key, c) += gradient * keep * probability[key];
          }
          weighted += probability[key] * d_probability[key];
        }
        for (std::size_t key = first; key <= query; ++key) {
          const double d_score = probability[key] * (d_probability[key] - weighted) * at.scale;
          for (std::size_t c = 0; c < at.width; ++c) {
            at.query(gradients.query, query, c) += d_score * at.key(operands.key, key, c);
            at.key(gradients.key, key, c) += d_score * at.query(operands.query, query, c);
          }
        }
      }
    }
  }
}

}  // namespace tranche::kernels::reference
