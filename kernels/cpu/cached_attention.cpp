#include "kernels/cpu/cached_attention.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/cached_attention.cpp"
#include <hwy/foreach_target.h>
// Must follow foreach_target.h.
#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/row-inl.h"
#include "kernels/cpu/tasks.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

constexpr std::int64_t key_block = 64;  // keys between two updates of the maximum; a block stays in the cache

/// A query and its sums so far.
struct QueryState {
  std::int64_t first = 0, end = 0;  // keys that it sees
  float highest = -std::numeric_limits<float>::infinity();
  float sum = 0;  // of exp(score - highest)
};

/// The scores of `count` keys, rows of `width` elements, with an already scaled query. It processes four keys
/// at a time, each with a separate sum, so that a key's score does not depend on its neighbours.
template <class T>
HWY_INLINE void score_keys(const float* query, const T* keys, std::int64_t count, std::int64_t width,
                           float* scores) {
  std::int64_t key = 0;
  for (; key + 4 <= count; key += 4) {
    const T* a = keys + key * width;
    auto sum_0 = hn::Zero(FloatTag()), sum_1 = sum_0, sum_2 = sum_0, sum_3 = sum_0;
    for_vectors(width, [&](std::int64_t i, std::int64_t lanes) HWY_ATTR {
      const FloatVector q = load_at(query, i, lanes);
      sum_0 = hn::MulAdd(q, load_at(a, i, lanes), sum_0);
      sum_1 = hn::MulAdd(q, load_at(a + width, i, lanes), sum_1);
      sum_2 = hn::MulAdd(q, load_at(a + 2 * width, i, lanes), sum_2);
      sum_3 = hn::MulAdd(q, load_at(a + 3 * width, i, lanes), sum_3);
    });
    scores[key] = sum_of(sum_0);
    scores[key + 1] = sum_of(sum_1);
    scores[key + 2] = sum_of(sum_2);
    scores[key + 3] = sum_of(sum_3);
  }
  for (; key < count; ++key) {
    auto sum = hn::Zero(FloatTag());
    for_vectors(width, [&](std::int64_t i, std::int64_t lanes) HWY_ATTR {
      sum = hn::MulAdd(load_at(query, i, lanes), load_at(keys + key * width, i, lanes), sum);
    });
    scores[key] = sum_of(sum);
  }
}

/// out[i ...] = out[i ...] * fade + sum of weights[key] * values[key, i ...], for `vectors` whole vectors of
/// columns, which stay in registers.
template <int vectors, class T>
HWY_INLINE void add_columns(const float* weights, const T* values, std::int64_t count, std::int64_t width,
                            float fade, float* out) {
  const std::int64_t step = lane_count();
  const auto factor = hn::Set(FloatTag(), fade);
  FloatVector sums[vectors];
  for (int k = 0; k < vectors; ++k) sums[k] = hn::Mul(load(out + k * step), factor);
  for (std::int64_t key = 0; key < count; ++key) {
    const auto weight = hn::Set(FloatTag(), weights[key]);
    const T* row = values + key * width;
    for (int k = 0; k < vectors; ++k) sums[k] = hn::MulAdd(weight, load(row + k * step), sums[k]);
  }
  for (int k = 0; k < vectors; ++k) store(sums[k], out + k * step);
}

template <class T>
HWY_INLINE void add_values(const float* weights, const T* values, std::int64_t count, std::int64_t width,
                           float fade, float* out) {
  const std::int64_t step = lane_count();
  std::int64_t i = 0;
  for (; i + 8 * step <= width; i += 8 * step)
    add_columns<8>(weights, values + i, count, width, fade, out + i);
  if (i + 4 * step <= width) {
    add_columns<4>(weights, values + i, count, width, fade, out + i);
    i += 4 * step;
  }
  for (; i + step <= width; i += step) add_columns<1>(weights, values + i, count, width, fade, out + i);
  if (i == width) return;
  const std::int64_t rest = width - i;
  auto sum = hn::Mul(load_at(out, i, rest), hn::Set(FloatTag(), fade));
  for (std::int64_t key = 0; key < count; ++key) {
    sum = hn::MulAdd(hn::Set(FloatTag(), weights[key]), load_at(values + key * width, i, rest), sum);
  }
  store_at(sum, out, i, rest);
}

/// Processes a block of keys [begin, end), which start at `keys` and `values`, for a query that sees some of
/// them.
template <class T>
HWY_INLINE void take_block(std::int64_t begin, std::int64_t end, const T* keys, const T* values,
                           std::int64_t width, const float* query, QueryState& state, float* out) {
  const std::int64_t first = std::max(begin, state.first), count = std::min(end, state.end) - first;
  if (count <= 0) return;
  const std::int64_t skipped = (first - begin) * width;
  float scores[key_block];
  score_keys(query, keys + skipped, count, width, scores);
  const float highest = std::max(state.highest, *std::max_element(scores, scores + count));
  const auto subtracted = hn::Set(FloatTag(), highest);
  auto sum = hn::Zero(FloatTag());
  for_vectors(count, [&](std::int64_t i, std::int64_t lanes) HWY_ATTR {
    const FloatVector weight = exp(hn::Sub(load_at(scores, i, lanes), subtracted));
    store_at(weight, scores, i, lanes);
    sum = hn::Add(sum, keep_first(weight, lanes, hn::Zero(FloatTag())));
  });
  const float fade = hn::GetLane(exp(hn::Set(FloatTag(), state.highest - highest)));
  state.highest = highest;
  state.sum = state.sum * fade + sum_of(sum);
  add_values(scores, values + skipped, count, width, fade, out);
}

/// Processes queries [first, first + count) of a key head, counted over the new tokens and, within them, the
/// heads of the group: each block of keys serves all of them while it is in the cache.
template <class T>
void attend_queries(const CachedAttention& call, std::int64_t batch, std::int64_t key_head,
                    std::int64_t first, std::int64_t count) {
  const std::int64_t width = call.head_width, group = call.group();
  const std::int64_t before = call.lengths[batch] - call.time;
  float queries[cached_query_elements], sums[cached_query_elements];
  QueryState states[cached_query_block];
  const auto row_of = [&](std::int64_t q) { return batch * call.time + q / group; };
  const auto column_of = [&](std::int64_t q) { return (key_head * group + q % group) * width; };
  std::int64_t begin = std::numeric_limits<std::int64_t>::max(), end = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t q = first + i, position = before + q / group;
    const T* from = static_cast<const T*>(call.query.data) + row_of(q) * call.query.stride + column_of(q);
    const auto scale = hn::Set(FloatTag(), call.scale);
    for_vectors(width, [&](std::int64_t at, std::int64_t lanes) HWY_ATTR {
      store_at(hn::Mul(load_at(from, at, lanes), scale), queries + i * width, at, lanes);
      store_at(hn::Zero(FloatTag()), sums + i * width, at, lanes);
    });
    states[i].first = call.first_key(position);
    states[i].end = position + 1;
    begin = std::min(begin, states[i].first);
    end = std::max(end, states[i].end);
  }
  const T* keys = static_cast<const T*>(call.keys) + call.head(batch, key_head);
  const T* values = static_cast<const T*>(call.values) + call.head(batch, key_head);
  for (std::int64_t at = begin / key_block * key_block; at < end; at += key_block) {
    for (std::int64_t i = 0; i < count; ++i) {
      take_block(at, at + key_block, keys + at * width, values + at * width, width, queries + i * width,
                 states[i], sums + i * width);
    }
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t q = first + i;
    T* to = static_cast<T*>(call.out) + row_of(q) * call.heads * width + column_of(q);
    const auto factor = hn::Set(FloatTag(), 1.0f / states[i].sum);
    for_vectors(width, [&](std::int64_t at, std::int64_t lanes) HWY_ATTR {
      store_at(hn::Mul(load_at(sums + i * width, at, lanes), factor), to, at, lanes);
    });
  }
}

void attend(const CachedAttention& call, std::int64_t batch, std::int64_t key_head, std::int64_t first,
            std::int64_t count) {
  with_floating(call.dtype,
                [&](auto type) { attend_queries<decltype(type)>(call, batch, key_head, first, count); });
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tranche::kernels::cpu {

HWY_EXPORT(attend);

void append_to_cache(const CacheAppend& call, int threads) {
  const auto bytes = static_cast<std::size_t>(call.head_width * size_of(call.dtype));
  const std::int64_t rows = call.batch * call.time;
  parallel_ranges(
      threads, rows, row_grain(2 * call.key_value_heads * call.head_width),
      [&](std::int64_t first, std::int64_t count) {
        for (std::int64_t row = first; row < first + count; ++row) {
          const std::int64_t entry = row / call.time;
          const std::int64_t length = call.lengths[entry];
          if (length == 0) continue;
          const std::int64_t position = length - call.time + row % call.time;
          for (std::int64_t head = 0; head < call.key_value_heads; ++head) {
            const std::int64_t to = call.head(entry, head) + position * call.head_width;
            const std::int64_t from = head * call.head_width;
            std::memcpy(element_at(call.dtype, call.keys, to),
                        element_at(call.dtype, call.key.data, row * call.key.stride + from), bytes);
            std::memcpy(element_at(call.dtype, call.values, to),
                        element_at(call.dtype, call.value.data, row * call.value.stride + from), bytes);
          }
        }
      });
}

void attention_with_cache(const CachedAttention& call, int threads) {
  if (call.time == 0) return;
  const auto run = HWY_DYNAMIC_DISPATCH(attend);
  const std::int64_t queries = call.time * call.group();
  const std::int64_t each = std::min(cached_query_elements / call.head_width, cached_query_block);
  const std::int64_t parts = (queries + each - 1) / each;
  const std::int64_t row_bytes = call.heads * call.head_width * size_of(call.dtype);
  parallel_tasks(threads, call.batch * call.key_value_heads * parts, [&](std::int64_t task, int) {
    const std::int64_t part = task % parts, head = task / parts % call.key_value_heads,
                       entry = task / parts / call.key_value_heads;
    if (call.lengths[entry] > 0) {
      return run(call, entry, head, part * each, std::min(each, queries - part * each));
    }
    if (head > 0 || part > 0) return;
    char* rows = static_cast<char*>(call.out) + entry * call.time * row_bytes;
    std::memset(rows, 0, static_cast<std::size_t>(call.time * row_bytes));
  });
}

}  // namespace tranche::kernels::cpu
#endif
