#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention_tile.cpp"
#include <hwy/foreach_target.h>
// Must follow foreach_target.h.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/attention_tile.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/row-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

void scale_row(float* row, std::int64_t count, float factor) {
  const FloatVector factors = hn::Set(FloatTag(), factor);
  for_vectors(count, [&](std::int64_t i, std::int64_t lanes) {
    store_at(hn::Mul(load_at(row, i, lanes), factors), row, i, lanes);
  });
}

void softmax_rows(const AttentionTile& tile, bool first, float* scores, float* maximum, float* sum,
                  float* accumulated, std::int64_t head_width) {
  const FloatTag d;
  constexpr float infinity = std::numeric_limits<float>::infinity();
  float factors[attention_keys];
  for (std::int64_t row = 0; row < tile.queries; ++row) {
    const std::int64_t hidden = tile.hidden(row), visible = tile.visible(row) - hidden;
    float* score = scores + row * tile.keys + hidden;
    std::fill(score - hidden, score, 0.0f);
    std::fill(score + visible, score + tile.keys - hidden, 0.0f);
    if (visible == 0) {
      if (first) maximum[row] = -infinity;
      if (first) sum[row] = 0.0f;
      continue;
    }
    FloatVector highest = hn::Set(d, -infinity);
    for_vectors(visible, [&](std::int64_t i, std::int64_t lanes) {
      highest = hn::Max(highest, keep_first(load_at(score, i, lanes), lanes, hn::Set(d, -infinity)));
    });
    const float before = first ? -infinity : maximum[row];
    const float now = std::max(before, max_of(highest));
    const FloatVector offset = hn::Set(d, now);
    FloatVector total = hn::Zero(d);
    for_vectors(visible, [&](std::int64_t i, std::int64_t lanes) {
      const FloatVector term = exp(hn::Sub(load_at(score, i, lanes), offset));
      total = hn::Add(total, keep_first(term, lanes, hn::Zero(d)));
      store_at(term, score, i, lanes);
    });
    if (tile.dropout != nullptr) {
      tile.dropout->factors(tile.sample, tile.element(row, hidden), visible, factors);
      for_vectors(visible, [&](std::int64_t i, std::int64_t lanes) {
        store_at(hn::Mul(load_at(score, i, lanes), load_at(factors, i, lanes)), score, i, lanes);
      });
    }
    if (first) {
      sum[row] = sum_of(total);
    } else {
      // It is 0 if no earlier tile had a key that the row sees.
      const float decay = now == before ? 1.0f : std::exp(before - now);
      sum[row] = sum[row] * decay + sum_of(total);
      if (decay != 1.0f) scale_row(accumulated + row * head_width, head_width, decay);
    }
    maximum[row] = now;
  }
}

void finish_rows(std::int64_t queries, const float* maximum, const float* sum, float* accumulated,
                 std::int64_t head_width, DataType dtype, void* out, std::int64_t out_stride,
                 float* log_sum_exp) {
  for (std::int64_t row = 0; row < queries; ++row) {
    scale_row(accumulated + row * head_width, head_width, 1.0f / sum[row]);
    log_sum_exp[row] = maximum[row] + std::log(sum[row]);
  }
  narrow_tile(accumulated, head_width, queries, head_width, dtype, out, out_stride);
}

template <class T>
void project(std::int64_t queries, std::int64_t head_width, const float* d_out, const T* out,
             std::int64_t out_stride, float* projection) {
  for (std::int64_t row = 0; row < queries; ++row) {
    FloatVector sum = hn::Zero(FloatTag());
    for_vectors(head_width, [&](std::int64_t i, std::int64_t lanes) {
      const FloatVector term =
          hn::Mul(load_at(d_out + row * head_width, i, lanes), load_at(out + row * out_stride, i, lanes));
      sum = hn::Add(sum, term);
    });
    projection[row] = sum_of(sum);
  }
}

void project_any(std::int64_t queries, std::int64_t head_width, const float* d_out, DataType dtype,
                 const void* out, std::int64_t out_stride, float* projection) {
  with_floating(dtype, [&](auto element) {
    project(queries, head_width, d_out, static_cast<const decltype(element)*>(out), out_stride, projection);
  });
}

void softmax_backward_rows(const AttentionTile& tile, float scale, const float* log_sum_exp,
                           const float* projection, float* scores, float* d_probabilities) {
  const FloatTag d;
  const FloatVector scales = hn::Set(d, scale);
  float factors[attention_keys];
  if (tile.dropout == nullptr) std::fill(factors, factors + attention_keys, 1.0f);
  for (std::int64_t row = 0; row < tile.queries; ++row) {
    const std::int64_t hidden = tile.hidden(row), visible = tile.visible(row) - hidden;
    float* score = scores + row * tile.keys + hidden;
    float* gradient = d_probabilities + row * tile.keys + hidden;
    const FloatVector offset = hn::Set(d, log_sum_exp[row]);
    const FloatVector projected = hn::Set(d, projection[row]);
    if (tile.dropout != nullptr) {
      tile.dropout->factors(tile.sample, tile.element(row, hidden), visible, factors);
    }
    for_vectors(visible, [&](std::int64_t i, std::int64_t lanes) {
      const FloatVector probability = exp(hn::Sub(load_at(score, i, lanes), offset));
      const FloatVector factor = load_at(factors, i, lanes);
      const FloatVector dropped = hn::Mul(load_at(gradient, i, lanes), factor);
      store_at(hn::Mul(hn::Mul(probability, hn::Sub(dropped, projected)), scales), gradient, i, lanes);
      store_at(hn::Mul(probability, factor), score, i, lanes);
    });
    for (float* masked : {score, gradient}) {
      std::fill(masked - hidden, masked, 0.0f);
      std::fill(masked + visible, masked + tile.keys - hidden, 0.0f);
    }
  }
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tranche::kernels::cpu {

HWY_EXPORT(softmax_rows);
HWY_EXPORT(finish_rows);
HWY_EXPORT(project_any);
HWY_EXPORT(softmax_backward_rows);

void softmax_tile(const AttentionTile& tile, bool first, float* scores, float* maximum, float* sum,
                  float* accumulated, std::int64_t head_width) {
  HWY_DYNAMIC_DISPATCH(softmax_rows)(tile, first, scores, maximum, sum, accumulated, head_width);
}

void finish_softmax(std::int64_t queries, const float* maximum, const float* sum, float* accumulated,
                    std::int64_t head_width, DataType dtype, void* out, std::int64_t out_stride,
                    float* log_sum_exp) {
  HWY_DYNAMIC_DISPATCH(finish_rows)
  (queries, maximum, sum, accumulated, head_width, dtype, out, out_stride, log_sum_exp);
}

void project_rows(std::int64_t queries, std::int64_t head_width, const float* d_out, DataType dtype,
                  const void* out, std::int64_t out_stride, float* projection) {
  HWY_DYNAMIC_DISPATCH(project_any)(queries, head_width, d_out, dtype, out, out_stride, projection);
}

void softmax_backward_tile(const AttentionTile& tile, float scale, const float* log_sum_exp,
                           const float* projection, float* scores, float* d_probabilities) {
  HWY_DYNAMIC_DISPATCH(softmax_backward_rows)(tile, scale, log_sum_exp, projection, scores, d_probabilities);
}

}  // namespace tranche::kernels::cpu
#endif
