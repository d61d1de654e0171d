// Attention of new tokens over cached keys and values. A block computes one query. Each of its warps takes
// four keys at a time, with its lanes along a head, and keeps a maximum, a sum and weighted values of its
// own; these are combined in the order of the warps. Bytes per query: 2 * keys * head width * size(dtype)
// read. Heads of a group read the same keys, all but the first from the L2 cache. The order of sums depends
// only on the query's position.

#include <cfloat>

#include "kernels/cuda/cached_attention.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/geometry.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/reduce.h"

namespace tranche::kernels::cuda {

namespace {

constexpr int block_threads = 256;
constexpr int block_warps = block_threads / warp_size;
constexpr int keys_at_once = 4;

/// A thread copies one element of a key and of a value; x runs over the elements of a token's heads, y over
/// tokens.
template <class T>
__global__ void __launch_bounds__(block_threads)
    append_kernel(const T* key, const std::int64_t key_stride, const T* value,
                  const std::int64_t value_stride, T* keys, T* values, const std::int32_t* lengths,
                  const std::int64_t rows, const std::int64_t time, const std::int64_t heads,
                  const std::int64_t width, const std::int64_t capacity) {
  const std::int64_t column = std::int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= rows || column >= heads * width) return;
  const std::int64_t entry = row / time, length = lengths[entry];
  if (length == 0) return;
  const std::int64_t position = length - time + row % time;
  const std::int64_t to = ((entry * heads + column / width) * capacity + position) * width + column % width;
  keys[to] = key[row * key_stride + column];
  values[to] = value[row * value_stride + column];
}

struct Attended {
  std::int64_t time, heads, group, width, capacity, window, query_stride;
  float scale;
  const std::int32_t* lengths;
};

/// `parts`: the most elements of a head that a lane has, 32 apart. They are kept in registers: 64 per thread
/// with four blocks on a multiprocessor, up to 255 with one.
template <int parts, class T>
__global__ void __launch_bounds__(block_threads, parts <= 4   ? 4
                                                 : parts <= 8 ? 2
                                                              : 1)
    attention_kernel(const Attended call, const Elements<T> query, const Elements<T> keys,
                     const Elements<T> values, const Elements<T> out) {
  const int lane = static_cast<int>(threadIdx.x) % warp_size,
            warp = static_cast<int>(threadIdx.x) / warp_size;
  const std::int64_t head = blockIdx.x % call.heads, row = blockIdx.x / call.heads;
  const std::int64_t entry = row / call.time, length = call.lengths[entry];
  const std::int64_t to = (row * call.heads + head) * call.width;
  const auto in_head = [&](int part) { return lane + part * warp_size < call.width; };
  if (length == 0) {
    for (int part = 0; part < parts; ++part) {
      const float zero[1] = {0.0f};
      if (warp == 0 && in_head(part)) out.template store<1>(to + lane + part * warp_size, zero);
    }
    return;
  }
  const std::int64_t position = length - call.time + row % call.time;
  const std::int64_t first = call.window > 0 && position >= call.window ? position - call.window + 1 : 0;
  const std::int64_t base =
      (entry * (call.heads / call.group) + head / call.group) * call.capacity * call.width;
  const auto element = [&](const Elements<T>& from, std::int64_t at, int part) {
    float value[1] = {0.0f};
    if (in_head(part)) {
      Elements<T>::template widen<1>(from.template load<1>(at + lane + part * warp_size), value);
    }
    return value[0];
  };
  float q[parts], sums[parts] = {};
#pragma unroll
  for (int part = 0; part < parts; ++part) {
    q[part] = call.scale * element(query, row * call.query_stride + head * call.width, part);
  }
  float highest = -FLT_MAX, total = 0.0f;
  for (std::int64_t key = first + warp * keys_at_once; key <= position; key += block_warps * keys_at_once) {
    float scores[keys_at_once];
    float above = highest;
#pragma unroll
    for (int k = 0; k < keys_at_once; ++k) {
      float score = 0.0f;
      if (key + k <= position) {
#pragma unroll
        for (int part = 0; part < parts; ++part) {
          score += q[part] * element(keys, base + (key + k) * call.width, part);
        }
      }
      scores[k] = warp_sum(score);
      if (key + k <= position) above = fmaxf(above, scores[k]);
    }
    const float fade = expf(highest - above);
    highest = above;
    total *= fade;
#pragma unroll
    for (int part = 0; part < parts; ++part) sums[part] *= fade;
#pragma unroll
    for (int k = 0; k < keys_at_once; ++k) {
      if (key + k > position) break;
      const float weight = expf(scores[k] - highest);
      total += weight;
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        sums[part] += weight * element(values, base + (key + k) * call.width, part);
      }
    }
  }
  float* shared = dynamic_shared<float>();  // for each warp: maximum, sum, weighted values
  const std::int64_t of_warp = call.width + 2;
  if (lane == 0) {
    shared[warp * of_warp] = highest;
    shared[warp * of_warp + 1] = total;
  }
#pragma unroll
  for (int part = 0; part < parts; ++part) {
    if (in_head(part)) shared[warp * of_warp + 2 + lane + part * warp_size] = sums[part];
  }
  __syncthreads();
  for (int w = 0; w < block_warps; ++w) highest = fmaxf(highest, shared[w * of_warp]);
  total = 0.0f;
  for (int w = 0; w < block_warps; ++w) {
    total += shared[w * of_warp + 1] * expf(shared[w * of_warp] - highest);
  }
  for (std::int64_t i = threadIdx.x; i < call.width; i += block_threads) {
    float sum = 0.0f;
    for (int w = 0; w < block_warps; ++w) {
      sum += shared[w * of_warp + 2 + i] * expf(shared[w * of_warp] - highest);
    }
    const float result[1] = {sum / total};
    out.template store<1>(to + i, result);
  }
}

template <class T>
Elements<T> elements_at(const void* data) {
  return {const_cast<void*>(data)};  // Elements serves reading and writing; only `out` is written
}

template <int parts, class T>
void launch_attention(Stream& stream, const CachedAttention& call) {
  const Attended attended{call.time,   call.heads,        call.group(), call.head_width, call.capacity,
                          call.window, call.query.stride, call.scale,   call.lengths};
  launch(
      stream, "attention_with_cache", attention_kernel<parts, T>,
      {.grid = static_cast<unsigned>(call.batch * call.time * call.heads),
       .block = block_threads,
       .dynamic_shared_bytes = static_cast<std::size_t>(block_warps * (call.head_width + 2)) * sizeof(float)},
      attended, elements_at<T>(call.query.data), elements_at<T>(call.keys), elements_at<T>(call.values),
      elements_at<T>(call.out));
}

}  // namespace

void append_to_cache(Stream& stream, const CacheAppend& call) {
  const std::int64_t rows = call.batch * call.time, columns = call.key_value_heads * call.head_width;
  const Tile tile = tile_of(columns, block_threads);
  with_storage(call.dtype, [&](auto storage) {
    using T = decltype(storage);
    launch(stream, "append_to_cache", append_kernel<T>,
           {.grid = dim3(static_cast<unsigned>(divide_round_up(rows, tile.y)),
                         static_cast<unsigned>(divide_round_up(columns, tile.x))),
            .block = dim3(static_cast<unsigned>(tile.x), static_cast<unsigned>(tile.y))},
           static_cast<const T*>(call.key.data), call.key.stride, static_cast<const T*>(call.value.data),
           call.value.stride, static_cast<T*>(call.keys), static_cast<T*>(call.values), call.lengths, rows,
           call.time, call.key_value_heads, call.head_width, call.capacity);
  });
}

void attention_with_cache(Stream& stream, const CachedAttention& call) {
  with_storage(call.dtype, [&](auto storage) {
    using T = decltype(storage);
    if (call.head_width <= 2 * warp_size) return launch_attention<2, T>(stream, call);
    if (call.head_width <= 4 * warp_size) return launch_attention<4, T>(stream, call);
    if (call.head_width <= 8 * warp_size) return launch_attention<8, T>(stream, call);
    launch_attention<cached_head_width / warp_size, T>(stream, call);
  });
}

}  // namespace tranche::kernels::cuda
