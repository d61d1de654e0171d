#pragma once
#include <cstdint>

#include "kernels/meta/cost.h"
#include "tranche/core/dtype.h"

namespace tranche::kernels::meta {

/// Pairs of query and key that see each other, over the batch.
inline double attention_pairs(std::int64_t batch, std::int64_t time) {
  return static_cast<double>(batch) * static_cast<double>(time) * static_cast<double>(time + 1) / 2.0;
}

/// Per pair: two dot products of `width`, and 5 operations a head for the softmax. Pairs above the diagonal
/// are not counted.
inline Cost attention_forward_cost(std::int64_t batch, std::int64_t time, std::int64_t width,
                                   std::int64_t heads, DataType dtype) {
  const auto w = static_cast<double>(width), h = static_cast<double>(heads);
  const double rows = static_cast<double>(batch) * static_cast<double>(time);
  const auto bytes = static_cast<double>(size_of(dtype));
  return {attention_pairs(batch, time) * (4.0 * w + 5.0 * h), 3.0 * rows * w * bytes,
          rows * w * bytes + 4.0 * rows * h};
}

/// Per pair: five dot products of `width` (one is the scores again), and 6 operations a head.
inline Cost attention_backward_cost(std::int64_t batch, std::int64_t time, std::int64_t width,
                                    std::int64_t heads, DataType dtype) {
  const auto w = static_cast<double>(width), h = static_cast<double>(heads);
  const double rows = static_cast<double>(batch) * static_cast<double>(time);
  const auto bytes = static_cast<double>(size_of(dtype));
  return {attention_pairs(batch, time) * (10.0 * w + 6.0 * h) + 2.0 * rows * w,
          5.0 * rows * w * bytes + 4.0 * rows * h, 3.0 * rows * w * bytes};
}

}  // namespace tranche::kernels::meta
