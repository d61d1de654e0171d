// Fused causal attention on tensor cores, backward. Algorithm: Dao, "FlashAttention-2: faster attention with
// better parallelism and work partitioning", 2023, arXiv 2307.08691. It is divided into two kernels. The
// first computes the gradients of the queries and, for each query, dot(d_out, out); the second the gradients
// of keys and values. A block has the rows that it writes and loops over the others in order. So there are
// neither atomics nor partial sums, but 7 GEMMs instead of 5.
//
// Each pair of launches covers as many (batch, head), in whole groups that share a key, as the workspace can
// hold with 8 bytes per token. Registers (nvcc 13.0), none spilled: queries 222 (heads of 64) and 219 (128),
// keys 254 and 255; with a mask or groups queries 234 and 228, keys 250 and 255.

#include <algorithm>
#include <limits>

#include "kernels/cuda/attention.h"
#include "kernels/cuda/attention_tiles.h"
#include "kernels/cuda/launch.h"

namespace tranche::kernels::cuda {

namespace {

template <class T>
struct BackwardArguments {
  const T* d_out;
  HeadRows<const T> query;
  KeyRows<T> key;
  const T* out;
  const float* log_sum_exp;
  HeadRows<T> d_query, d_key, d_value;
  QueryStatistics* statistics;  ///< [heads of this launch, padded count]
  int time, first, count;       ///< number of keys; the first query and the number of queries
  int heads, group;             ///< group: heads that share a key
  int first_head;               ///< first head of this launch, counted over batch and head; a launch has
                                ///< whole groups
  std::int64_t width;
  float scale;
  FlashMask mask;
};

/// Offsets of a head: first row of its batch entry in keys and in queries, first column in `out` and queries,
/// and in keys.
struct Place {
  std::int64_t row, query_row, column, key_column;
};

constexpr float log2_of_e = 1.4426950408889634f;
constexpr float infinity = std::numeric_limits<float>::infinity();

/// One of the eight 16-bit elements of a vector. The words are taken apart, because reading the vector
/// through a T* is undefined: GCC may then read it before it is written.
template <class T>
__device__ __forceinline__ float element_of(const Vector16& vector, int i) {
  return to_float(T{static_cast<std::uint16_t>(vector.words[i / 2] >> (i % 2 * 16))});
}

/// Multiplies eight 16-bit elements by eight others. Arguments are passed by value, so that each operand is
/// one load; through a reference the compiler no longer knows the alignment and may load element by element.
template <class T>
__device__ __forceinline__ float dot_of(const Vector16 a, const Vector16 b) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(element_of<T>(a, i), element_of<T>(b, i), sum);
  return sum;
}

/// Computes {log2_sum_exp, projection} of the block's queries, and stores them in shared memory for this
/// kernel and in scratch memory for the next. The tile of d_out is in shared memory.
template <class T, int head, int queries, int threads>
__device__ __forceinline__ void query_statistics(const T* shared_d_out, const T* out, std::int64_t stride,
                                                 const float* log_sum_exp, int there, QueryStatistics* shared,
                                                 QueryStatistics* global) {
  constexpr int chunks = head / 8;  // lanes that share a row
  for (int at = static_cast<int>(threadIdx.x); at < queries * chunks; at += threads) {
    const int row = at / chunks, chunk = at % chunks;
    float sum = 0.0f;
    if (row < there) {
      sum = dot_of<T>(*reinterpret_cast<const Vector16*>(shared_d_out + place_in_tile(row, chunk, head)),
                      *reinterpret_cast<const Vector16*>(out + row * stride + chunk * 8));
    }
#pragma unroll
    for (int distance = chunks / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(whole_warp, sum, distance);
    }
    if (chunk == 0) {
      const QueryStatistics made{row < there ? log_sum_exp[row] * log2_of_e : infinity, sum};
      shared[row] = made;
      global[row] = made;
    }
  }
}

/// A block computes the gradient of `own` queries of one head in a loop over tiles of keys. With `masked` a
/// window or documents hide earlier keys from a query.
template <class T, int head, bool masked>
__global__ void __launch_bounds__(backward_shape(head).threads(), head == 64 ? 2 : 1)
    query_gradient_kernel(BackwardArguments<T> p) {
  constexpr BackwardShape shape = backward_shape(head);
  constexpr int queries = shape.own, keys = shape.other, threads = shape.threads();
  constexpr int stride = tile_stride(head);
  constexpr int m_tiles = shape.rows_per_warp() / 16, o_tiles = head / 8, steps = head / 16;

  const int first_local =  // index among the call's queries
      longest_first(static_cast<int>(blockIdx.y), static_cast<int>(gridDim.y)) * queries;
  const int first_query = p.first + first_local;
  const int head_number = p.first_head + static_cast<int>(blockIdx.x);
  const std::int64_t first_row =
      static_cast<std::int64_t>(head_number / p.heads) * p.time;  // row of the batch entry
  const std::int64_t query_row = static_cast<std::int64_t>(head_number / p.heads) * p.count + first_local;
  const std::int64_t column = static_cast<std::int64_t>(head_number % p.heads) * head;
  const std::int64_t out_at = query_row * p.width + column;

  T* shared_query = dynamic_shared<T>();
  T* shared_d_out = shared_query + queries * stride;
  T* shared_key = shared_d_out + queries * stride;   // two buffers
  T* shared_value = shared_key + 2 * keys * stride;  // two buffers
  auto* statistics = reinterpret_cast<QueryStatistics*>(shared_value + 2 * keys * stride);
  const int first_tile = masked ? p.mask.first(first_row, first_query) / keys : 0;
  const T* key = p.key.data + (first_row + first_tile * keys) * p.key.stride +
                 static_cast<std::int64_t>(head_number % p.heads / p.group) * head;  // of the next tile
  const auto load_keys = [&](int tile) {
    const int at = tile % 2 * keys * stride, there = p.time - tile * keys;
    load_tile<head, keys, threads>(shared_key + at, key, p.key.stride, there);
    load_tile<head, keys, threads>(shared_value + at, key + p.key.to_value, p.key.stride, there);
    cp_async_commit();
    key += keys * p.key.stride;
  };
  load_tile<head, queries, threads>(shared_query, p.query.data + query_row * p.query.stride + column,
                                    p.query.stride, p.count - first_local);
  load_tile<head, queries, threads>(shared_d_out, p.d_out + out_at, p.width, p.count - first_local);
  cp_async_commit();
  load_keys(first_tile);
  cp_async_wait<1>();
  __syncthreads();
  query_statistics<T, head, queries, threads>(
      shared_d_out, p.out + out_at, p.width,
      p.log_sum_exp + static_cast<std::int64_t>(head_number) * p.count + first_local, p.count - first_local,
      statistics, p.statistics + static_cast<std::int64_t>(blockIdx.x) * padded_time(p.count) + first_local);
  __syncthreads();

  const int lane = lane_of_thread(), g = lane / 4, t = lane % 4;
  const int warp_row = warp_of_thread() * shape.rows_per_warp(), warp_query = first_query + warp_row;
  const float scale = p.scale * log2_of_e;
  std::uint32_t query_fragment[steps][m_tiles][4], d_out_fragment[steps][m_tiles][4];
  float log2_sum_exp[m_tiles][2], projection[m_tiles][2];
  [[maybe_unused]] int lowest[m_tiles][2];  // first key that the row sees
#pragma unroll
  for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      load_left<head>(query_fragment[step][m], shared_query, warp_row + 16 * m, step);
      load_left<head>(d_out_fragment[step][m], shared_d_out, warp_row + 16 * m, step);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const QueryStatistics row = statistics[warp_row + 16 * m + 8 * half + g];
      log2_sum_exp[m][half] = row.log2_sum_exp;
      projection[m][half] = row.projection;
      if constexpr (masked) lowest[m][half] = p.mask.first(first_row, warp_query + 16 * m + 8 * half + g);
    }
  }

  float gradient[m_tiles][o_tiles][4] = {};
  const int tiles = key_tiles_seen(first_query, queries, p.first + p.count, keys);
  for (int tile = first_tile; tile < tiles; ++tile) {
    cp_async_wait<0>();
    __syncthreads();
    if (tile + 1 < tiles) load_keys(tile + 1);
    const T* key_tile = shared_key + tile % 2 * keys * stride;
    const T* value_tile = shared_value + tile % 2 * keys * stride;
#pragma unroll 1
    for (int slice = 0; slice < keys / 16; ++slice) {
      const int first_key = tile * keys + 16 * slice;
      if (above_diagonal(warp_query, shape.rows_per_warp(), first_key)) break;
      if constexpr (masked) {
        if (p.mask.first(first_row, warp_query) >= first_key + 16) continue;
      }
      float score[m_tiles][2][4] = {}, d_probability[m_tiles][2][4] = {};
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        std::uint32_t right[4];
        load_right<head>(right, key_tile, 16 * slice, step);
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) {
          multiply_accumulate_16x8x16<T>(score[m][0], query_fragment[step][m], right[0], right[1]);
          multiply_accumulate_16x8x16<T>(score[m][1], query_fragment[step][m], right[2], right[3]);
        }
        load_right<head>(right, value_tile, 16 * slice, step);
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) {
          multiply_accumulate_16x8x16<T>(d_probability[m][0], d_out_fragment[step][m], right[0], right[1]);
          multiply_accumulate_16x8x16<T>(d_probability[m][1], d_out_fragment[step][m], right[2], right[3]);
        }
      }
      const bool crossing = crosses_diagonal(warp_query, first_key, 16);
      const int base = warp_query - first_key + g - 2 * t;
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int half = e / 2;
            float probability = exponential_of_two(fmaf(score[m][n][e], scale, -log2_sum_exp[m][half]));
            if (crossing && 8 * n + e % 2 > base + 16 * m + 8 * half) probability = 0.0f;
            if constexpr (masked) {
              if (first_key + 8 * n + 2 * t + e % 2 < lowest[m][half]) probability = 0.0f;
            }
            score[m][n][e] = probability * (d_probability[m][n][e] - projection[m][half]);
          }
        }
      }
      std::uint32_t left[m_tiles][4];
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) as_left<T>(left[m], score[m][0], score[m][1]);
#pragma unroll
      for (int n = 0; n < o_tiles; n += 2) {
        std::uint32_t right[4];
        load_right_transposed<head>(right, key_tile, 16 * slice, n / 2);
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) {
          multiply_accumulate_16x8x16<T>(gradient[m][n], left[m], right[0], right[1]);
          multiply_accumulate_16x8x16<T>(gradient[m][n + 1], left[m], right[2], right[3]);
        }
      }
    }
  }

  __syncwarp();
#pragma unroll
  for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
    for (int n = 0; n < o_tiles; ++n) {
      put_result<head>(shared_query, warp_row + 16 * m, n, gradient[m][n], p.scale, p.scale);
    }
  }
  __syncwarp();
  store_rows<head, shape.rows_per_warp()>(p.d_query.data + query_row * p.d_query.stride + column,
                                          p.d_query.stride, shared_query, warp_row, p.count - first_local);
}

/// A block computes the gradients of `own` keys and values of one head in a loop over tiles of queries. It
/// computes the transposed scores, with a row for each key, so that the probabilities are already the left
/// operand of both gradients. With `general` several heads may share the keys, and their queries follow each
/// other head by head; and a window or documents may hide keys from later queries.
template <class T, int head, bool general>
__global__ void __launch_bounds__(backward_shape(head).threads(), head == 64 ? 2 : 1)
    key_gradient_kernel(BackwardArguments<T> p) {
  constexpr BackwardShape shape = backward_shape(head);
  constexpr int keys = shape.own, queries = shape.other, threads = shape.threads();
  constexpr int stride = tile_stride(head);
  constexpr int m_tiles = shape.rows_per_warp() / 16, o_tiles = head / 8, steps = head / 16;

  const int first_key = static_cast<int>(blockIdx.y) * keys;  // the first keys are seen by most queries, so
                                                              // their blocks start first
  // The first of the heads that share the keys.
  const int head_number = p.first_head + static_cast<int>(blockIdx.x) * (general ? p.group : 1);
  const std::int64_t batch_row = static_cast<std::int64_t>(head_number / p.heads) * p.time;
  const int first_tile = first_query_tile(first_key, p.first, queries);
  int tiles = static_cast<int>(tiles_of(p.count, queries));
  if constexpr (general) {
    tiles = end_query_tile(p.mask.of(batch_row), p.first, first_tile, tiles, queries, first_key + keys);
  }
  if (tiles < first_tile) tiles = first_tile;  // no query sees the keys
  // Iterations first_tile, ... run through the tiles of the first head, then through those of the next.
  const int span = tiles - first_tile, end_turn = first_tile + (general ? p.group * span : span);
  T* shared_key = dynamic_shared<T>();
  T* shared_value = shared_key + keys * stride;
  T* shared_query = shared_value + keys * stride;         // two buffers
  T* shared_d_out = shared_query + 2 * queries * stride;  // two buffers
  auto* shared_statistics =
      reinterpret_cast<QueryStatistics*>(shared_d_out + 2 * queries * stride);  // two buffers
  // The head's offsets are kept in shared memory and read when needed, because the accumulators take nearly
  // all registers.
  auto* place = reinterpret_cast<Place*>(shared_statistics + 2 * queries);
  if (threadIdx.x == 0) {
    place->row = batch_row;
    place->query_row = static_cast<std::int64_t>(head_number / p.heads) * p.count;
    place->column = static_cast<std::int64_t>(head_number % p.heads) * head;
    place->key_column = static_cast<std::int64_t>(head_number % p.heads / p.group) * head;
  }
  __syncthreads();
  const auto load_queries = [&](int turn) {
    const int number =
        general ? (turn - first_tile) / span : 0;  // index of the head among those that share the keys
    const int tile = turn - number * span;
    const int at = turn % 2 * queries, there = p.count - tile * queries;
    const std::int64_t first_row = place->query_row + tile * queries, column = place->column + number * head;
    load_tile<head, queries, threads>(shared_query + at * stride,
                                      p.query.data + first_row * p.query.stride + column, p.query.stride,
                                      there);
    load_tile<head, queries, threads>(shared_d_out + at * stride, p.d_out + first_row * p.width + column,
                                      p.width, there);
    if (threadIdx.x < queries / 2) {
      const std::int64_t scratch = static_cast<std::int64_t>(blockIdx.x) * (general ? p.group : 1) + number;
      cp_async_16(shared_statistics + at + 2 * threadIdx.x,
                  p.statistics + scratch * padded_time(p.count) + tile * queries + 2 * threadIdx.x);
    }
    cp_async_commit();
  };
  const auto at_first_key = [&](auto* data, std::int64_t row_stride) {
    return data + (place->row + first_key) * row_stride + place->key_column;
  };
  const T* key = at_first_key(p.key.data, p.key.stride);
  load_tile<head, keys, threads>(shared_key, key, p.key.stride, p.time - first_key);
  load_tile<head, keys, threads>(shared_value, key + p.key.to_value, p.key.stride, p.time - first_key);
  cp_async_commit();
  if (first_tile < end_turn) {
    load_queries(first_tile);
  } else {
    cp_async_commit();
  }
  cp_async_wait<1>();
  __syncthreads();

  const int lane = lane_of_thread(), g = lane / 4, t = lane % 4;
  const int warp_row = warp_of_thread() * shape.rows_per_warp(), warp_key = first_key + warp_row;
  const float scale = p.scale * log2_of_e;
  // Both operands are kept in registers if the accumulators leave enough of them.
  constexpr bool value_in_registers = m_tiles == 1;
  std::uint32_t key_fragment[steps][m_tiles][4], value_fragment[value_in_registers ? steps : 1][m_tiles][4];
#pragma unroll
  for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      load_left<head>(key_fragment[step][m], shared_key, warp_row + 16 * m, step);
      if constexpr (value_in_registers) {
        load_left<head>(value_fragment[step][m], shared_value, warp_row + 16 * m, step);
      }
    }
  }

  float d_key[m_tiles][o_tiles][4] = {}, d_value[m_tiles][o_tiles][4] = {};
  for (int turn = first_tile; turn < end_turn; ++turn) {
    cp_async_wait<0>();
    __syncthreads();
    if (turn + 1 < end_turn) load_queries(turn + 1);
    const int tile = general ? first_tile + (turn - first_tile) % span : turn;
    const T* query_tile = shared_query + turn % 2 * queries * stride;
    const T* d_out_tile = shared_d_out + turn % 2 * queries * stride;
    const QueryStatistics* row = shared_statistics + turn % 2 * queries + 2 * t;
#pragma unroll 1
    for (int slice = 0; slice < queries / 16; ++slice) {
      const int first_query = p.first + tile * queries + 16 * slice;
      if (above_diagonal(first_query, 16, warp_key)) continue;
      if constexpr (general) {
        if (p.mask.first(place->row, first_query) >= warp_key + shape.rows_per_warp()) break;
      }
      float score[m_tiles][2][4] = {};
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        std::uint32_t right[4];
        load_right<head>(right, query_tile, 16 * slice, step);
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) {
          multiply_accumulate_16x8x16<T>(score[m][0], key_fragment[step][m], right[0], right[1]);
          multiply_accumulate_16x8x16<T>(score[m][1], key_fragment[step][m], right[2], right[3]);
        }
      }
      const bool crossing = crosses_diagonal(first_query, warp_key, shape.rows_per_warp());
      const int base = first_query - warp_key + 2 * t - g;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float log2_sum_exp = row[16 * slice + 8 * n + e % 2].log2_sum_exp;
#pragma unroll
          for (int m = 0; m < m_tiles; ++m) {
            score[m][n][e] = exponential_of_two(fmaf(score[m][n][e], scale, -log2_sum_exp));
            if (crossing && 16 * m + e / 2 * 8 > base + 8 * n + e % 2) score[m][n][e] = 0.0f;
          }
        }
      }
      if constexpr (general) {
        if (p.mask.first(place->row, first_query + 15) > warp_key) {
#pragma unroll
          for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int lowest = p.mask.first(place->row, first_query + 8 * n + 2 * t + e) - warp_key - g;
#pragma unroll
              for (int m = 0; m < m_tiles; ++m) {
                if (16 * m < lowest) score[m][n][e] = 0.0f;
                if (16 * m + 8 < lowest) score[m][n][2 + e] = 0.0f;
              }
            }
          }
        }
      }
      std::uint32_t left[m_tiles][4];
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) as_left<T>(left[m], score[m][0], score[m][1]);
#pragma unroll
      for (int n = 0; n < o_tiles; n += 2) {
        std::uint32_t right[4];
        load_right_transposed<head>(right, d_out_tile, 16 * slice, n / 2);
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) {
          multiply_accumulate_16x8x16<T>(d_value[m][n], left[m], right[0], right[1]);
          multiply_accumulate_16x8x16<T>(d_value[m][n + 1], left[m], right[2], right[3]);
        }
      }
      float d_probability[m_tiles][2][4] = {};
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        std::uint32_t right[4];
        load_right<head>(right, d_out_tile, 16 * slice, step);
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) {
          auto& own = value_fragment[value_in_registers ? step : 0][m];
          if constexpr (!value_in_registers) load_left<head>(own, shared_value, warp_row + 16 * m, step);
          multiply_accumulate_16x8x16<T>(d_probability[m][0], own, right[0], right[1]);
          multiply_accumulate_16x8x16<T>(d_probability[m][1], own, right[2], right[3]);
        }
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float projection = row[16 * slice + 8 * n + e % 2].projection;
#pragma unroll
          for (int m = 0; m < m_tiles; ++m) score[m][n][e] *= d_probability[m][n][e] - projection;
        }
      }
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) as_left<T>(left[m], score[m][0], score[m][1]);
#pragma unroll
      for (int n = 0; n < o_tiles; n += 2) {
        std::uint32_t right[4];
        load_right_transposed<head>(right, query_tile, 16 * slice, n / 2);
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) {
          multiply_accumulate_16x8x16<T>(d_key[m][n], left[m], right[0], right[1]);
          multiply_accumulate_16x8x16<T>(d_key[m][n + 1], left[m], right[2], right[3]);
        }
      }
    }
  }

  __syncwarp();
#pragma unroll
  for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
    for (int n = 0; n < o_tiles; ++n) {
      put_result<head>(shared_key, warp_row + 16 * m, n, d_key[m][n], p.scale, p.scale);
      put_result<head>(shared_value, warp_row + 16 * m, n, d_value[m][n], 1.0f, 1.0f);
    }
  }
  __syncwarp();
  store_rows<head, shape.rows_per_warp()>(at_first_key(p.d_key.data, p.d_key.stride), p.d_key.stride,
                                          shared_key, warp_row, p.time - first_key);
  store_rows<head, shape.rows_per_warp()>(at_first_key(p.d_value.data, p.d_value.stride), p.d_value.stride,
                                          shared_value, warp_row, p.time - first_key);
}

template <class T, int head>
void launch_backward(Stream& stream, const AttentionCall& call, const Workspace& workspace) {
  constexpr BackwardShape shape = backward_shape(head);
  constexpr std::size_t tiles = shape.tile_bytes(head), row = sizeof(QueryStatistics);
  BackwardArguments<T> arguments{static_cast<const T*>(call.d_out),
                                 rows_of<T>(call.parts[0]),
                                 key_rows_of<T>(call),
                                 static_cast<const T*>(call.out),
                                 call.log_sum_exp,
                                 rows_of<T>(call.d_parts[0]),
                                 rows_of<T>(call.d_parts[1]),
                                 rows_of<T>(call.d_parts[2]),
                                 static_cast<QueryStatistics*>(workspace.data),
                                 static_cast<int>(call.time),
                                 static_cast<int>(call.first_query),
                                 static_cast<int>(call.queries),
                                 static_cast<int>(call.heads),
                                 static_cast<int>(call.group()),
                                 0,
                                 call.width(),
                                 call.scale,
                                 {call.window, call.document_begin, static_cast<int>(call.time)}};
  const std::int64_t heads = call.batch * call.heads,
                     space = flash_heads(call.queries, call.group(), workspace.bytes);
  const bool masked = !call.mask(0).causal_only(), general = masked || call.group() > 1;
  const auto blocks = static_cast<unsigned>(tiles_of(call.queries, shape.own)),
             key_blocks = static_cast<unsigned>(tiles_of(call.time, shape.own));
  for (std::int64_t first = 0; first < heads; first += space) {
    arguments.first_head = static_cast<int>(first);
    const std::int64_t taken = std::min(space, heads - first);
    const dim3 grid(static_cast<unsigned>(taken), blocks),
        key_grid(static_cast<unsigned>(taken / call.group()), key_blocks);
    const auto threads = static_cast<unsigned>(shape.threads());
    launch(stream, "flash_backward_queries",
           masked ? query_gradient_kernel<T, head, true> : query_gradient_kernel<T, head, false>,
           {grid, threads, tiles + shape.own * row}, arguments);
    launch(stream, "flash_backward_keys",
           general ? key_gradient_kernel<T, head, true> : key_gradient_kernel<T, head, false>,
           {key_grid, threads, tiles + 2 * shape.other * row + sizeof(Place)}, arguments);
  }
}

template <class T>
void launch_backward(Stream& stream, const AttentionCall& call, const Workspace& workspace) {
  if (call.head_width == 64) return launch_backward<T, 64>(stream, call, workspace);
  launch_backward<T, 128>(stream, call, workspace);
}

}  // namespace

void flash_backward(Stream& stream, const AttentionCall& call, const Workspace& workspace) {
  if (call.dtype == DataType::bfloat16) return launch_backward<bfloat16>(stream, call, workspace);
  launch_backward<float16>(stream, call, workspace);
}

}  // namespace tranche::kernels::cuda
