// Fused causal attention on tensor cores, forward. Algorithm: Dao, "FlashAttention-2: faster attention with
// better parallelism and work partitioning", 2023, arXiv 2307.08691.
//
// It is one launch without scratch memory. It reads queries, keys and values once from memory, keys and
// values again from the L2 cache for each tile of 128 queries, and writes out and log_sum_exp once. Registers
// (nvcc 13.0), none spilled: 236 for heads of 64, 253 for 128 (248 and 255 with a mask), so that two blocks
// of 4 warps fit on a multiprocessor.

#include <limits>

#include "kernels/cuda/attention.h"
#include "kernels/cuda/attention_tiles.h"
#include "kernels/cuda/launch.h"

namespace tranche::kernels::cuda {

namespace {

template <class T>
struct ForwardArguments {
  HeadRows<const T> query;
  KeyRows<T> key;
  T* out;
  float* log_sum_exp;
  int time, first, count;   ///< number of keys; the first query and the number of queries
  int group;                ///< heads that share a key
  std::int64_t width;       ///< elements of a row of out
  float scale, log2_scale;  ///< of scores, and of scores in units of log(2)
  FlashMask mask;
};

constexpr float log2_of_e = 1.4426950408889634f;

/// A block computes `queries` rows of one head. Each warp holds its rows of scores and of the output in
/// registers. Tiles of keys and values pass through shared memory; the next one is loaded while the current
/// one is used. With `masked` a window or documents hide earlier keys from a query.
template <class T, int head, bool masked>
__global__ void __launch_bounds__(forward_shape.threads(), 2) flash_forward_kernel(ForwardArguments<T> p) {
  constexpr ForwardShape shape = forward_shape;
  constexpr int queries = shape.queries, keys = shape.keys, threads = shape.threads();
  constexpr int stride = tile_stride(head);
  constexpr int m_tiles = shape.rows_per_warp() / 16, n_tiles = keys / 8, o_tiles = head / 8,
                steps = head / 16;
  constexpr bool query_in_registers = head == 64;  // heads of 128 would leave too few registers for the
                                                   // accumulators
  constexpr float infinity = std::numeric_limits<float>::infinity();

  // Blocks start in the order of x, y, z: all heads' longest rows of tiles first.
  const int first_local =  // among the queries that there are
      longest_first(static_cast<int>(blockIdx.z), static_cast<int>(gridDim.z)) * queries;
  const int first_query = p.first + first_local;
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.y) * p.time;  // first row of the batch
                                                                                  // entry
  const std::int64_t query_row = static_cast<std::int64_t>(blockIdx.y) * p.count + first_local;
  const int first_tile = masked ? p.mask.first(first_row, first_query) / keys : 0;
  const T* query = p.query.data + query_row * p.query.stride + blockIdx.x * head;
  const T* key = p.key.data + (first_row + first_tile * keys) * p.key.stride +
                 blockIdx.x / static_cast<unsigned>(p.group) * head;  // of the next tile to load

  T* shared_query = dynamic_shared<T>();
  T* shared_keys = shared_query + queries * stride;  // two buffers of keys and values
  const auto load_keys = [&](int tile) {
    T* to = shared_keys + tile % 2 * 2 * keys * stride;
    const int there = p.time - tile * keys;
    load_tile<head, keys, threads>(to, key, p.key.stride, there);
    load_tile<head, keys, threads>(to + keys * stride, key + p.key.to_value, p.key.stride, there);
    cp_async_commit();
    key += keys * p.key.stride;
  };
  load_tile<head, queries, threads>(shared_query, query, p.query.stride, p.count - first_local);
  load_keys(first_tile);

  const int lane = lane_of_thread(), g = lane / 4, t = lane % 4;
  const int warp_row = warp_of_thread() * shape.rows_per_warp();
  const int warp_query = first_query + warp_row;

  float out[m_tiles][o_tiles][4] = {};
  float maximum[m_tiles][2], sum[m_tiles][2] = {};
#pragma unroll
  for (int m = 0; m < m_tiles; ++m) maximum[m][0] = maximum[m][1] = -infinity;
  std::uint32_t query_fragment[query_in_registers ? steps : 1][m_tiles][4];

  const int tiles = key_tiles_seen(first_query, queries, p.first + p.count, keys);
  for (int tile = first_tile; tile < tiles; ++tile) {
    cp_async_wait<0>();
    __syncthreads();  // all threads see the tile, and none still reads the previous one
    if (tile + 1 < tiles) load_keys(tile + 1);
    if constexpr (query_in_registers) {
      if (tile == first_tile) {
#pragma unroll
        for (int step = 0; step < steps; ++step) {
#pragma unroll
          for (int m = 0; m < m_tiles; ++m) {
            load_left<head>(query_fragment[step][m], shared_query, warp_row + 16 * m, step);
          }
        }
      }
    }
    const int first_key = tile * keys;
    if (above_diagonal(warp_query, shape.rows_per_warp(), first_key)) continue;
    if constexpr (masked) {
      if (p.mask.first(first_row, warp_query) >= first_key + keys) continue;
    }
    const T* key_tile = shared_keys + tile % 2 * 2 * keys * stride;
    const T* value_tile = key_tile + keys * stride;

    float score[m_tiles][n_tiles][4] = {};
#pragma unroll(query_in_registers ? steps : 1)
    for (int step = 0; step < steps; ++step) {
      if constexpr (!query_in_registers) {
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) {
          load_left<head>(query_fragment[0][m], shared_query, warp_row + 16 * m, step);
        }
      }
#pragma unroll
      for (int n = 0; n < n_tiles; n += 2) {
        std::uint32_t right[4];
        load_right<head>(right, key_tile, 8 * n, step);
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) {
          const auto& left = query_fragment[query_in_registers ? step : 0][m];
          multiply_accumulate_16x8x16<T>(score[m][n], left, right[0], right[1]);
          multiply_accumulate_16x8x16<T>(score[m][n + 1], left, right[2], right[3]);
        }
      }
    }
    if (crosses_diagonal(warp_query, first_key, keys)) {
      // Existing queries see only existing keys, so this also masks the tail.
      const int base = warp_query - first_key + g - 2 * t;
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
        for (int n = 0; n < n_tiles; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (8 * n + e % 2 > base + 16 * m + e / 2 * 8) score[m][n][e] = -infinity;
          }
        }
      }
    }
    if constexpr (masked) {
      if (p.mask.first(first_row, warp_query + shape.rows_per_warp() - 1) > first_key) {
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int lowest =
                p.mask.first(first_row, warp_query + 16 * m + 8 * half + g) - first_key - 2 * t;
#pragma unroll
            for (int n = 0; n < n_tiles; ++n) {
              if (8 * n < lowest) score[m][n][2 * half] = -infinity;
              if (8 * n + 1 < lowest) score[m][n][2 * half + 1] = -infinity;
            }
          }
        }
      }
    }
    float decay[m_tiles][2];
    bool grown = false;
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float highest = score[m][0][2 * half];
#pragma unroll
        for (int n = 0; n < n_tiles; ++n) {
          highest = fmaxf(highest, fmaxf(score[m][n][2 * half], score[m][n][2 * half + 1]));
        }
        // It is finite from the first tile on if every query sees key 0. Before a query has seen a key, any
        // finite number may replace -infinity, because its terms are 0.
        float now = fmaxf(maximum[m][half], row_maximum(highest));
        if (masked && now == -infinity) now = -1e30f;
        decay[m][half] = exponential_of_two((maximum[m][half] - now) * p.log2_scale);
        grown = grown || now != maximum[m][half];
        maximum[m][half] = now;
      }
    }
    if (__any_sync(whole_warp, grown)) {  // rare after the first tiles; otherwise all factors are 1
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (e % 2 == 0) sum[m][e / 2] *= decay[m][e / 2];
#pragma unroll
          for (int n = 0; n < o_tiles; ++n) out[m][n][e] *= decay[m][e / 2];
        }
      }
    }
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float offset = maximum[m][e / 2] * p.log2_scale;
#pragma unroll
        for (int n = 0; n < n_tiles; ++n) {
          score[m][n][e] = exponential_of_two(fmaf(score[m][n][e], p.log2_scale, -offset));
          sum[m][e / 2] += score[m][n][e];  // sum over this lane's columns
        }
      }
    }
#pragma unroll
    for (int step = 0; step < keys / 16; ++step) {
      std::uint32_t left[m_tiles][4];
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) as_left<T>(left[m], score[m][2 * step], score[m][2 * step + 1]);
#pragma unroll
      for (int n = 0; n < o_tiles; n += 2) {
        std::uint32_t right[4];
        load_right_transposed<head>(right, value_tile, 16 * step, n / 2);
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) {
          multiply_accumulate_16x8x16<T>(out[m][n], left[m], right[0], right[1]);
          multiply_accumulate_16x8x16<T>(out[m][n + 1], left[m], right[2], right[3]);
        }
      }
    }
  }

  // The warp's own rows of the query tile in shared memory collect the result for 16-byte stores.
  float* log_sum_exp =
      p.log_sum_exp + static_cast<std::int64_t>(blockIdx.y * gridDim.x + blockIdx.x) * p.count;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < m_tiles; ++m) {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = row_sum(sum[m][half]);
      factor[half] = 1.0f / total;
      const int row = first_local + warp_row + 16 * m + 8 * half + g;
      if (t == 0 && row < p.count) log_sum_exp[row] = maximum[m][half] * p.scale + logf(total);
    }
#pragma unroll
    for (int n = 0; n < o_tiles; ++n) {
      put_result<head>(shared_query, warp_row + 16 * m, n, out[m][n], factor[0], factor[1]);
    }
  }
  __syncwarp();
  T* out_rows = p.out + query_row * p.width + blockIdx.x * head;
  store_rows<head, shape.rows_per_warp()>(out_rows, p.width, shared_query, warp_row, p.count - first_local);
}

template <class T, int head, bool masked>
void launch_forward(Stream& stream, const AttentionCall& call) {
  constexpr ForwardShape shape = forward_shape;
  const ForwardArguments<T> arguments{rows_of<T>(call.parts[0]),
                                      key_rows_of<T>(call),
                                      static_cast<T*>(call.out),
                                      call.log_sum_exp,
                                      static_cast<int>(call.time),
                                      static_cast<int>(call.first_query),
                                      static_cast<int>(call.queries),
                                      static_cast<int>(call.group()),
                                      call.width(),
                                      call.scale,
                                      call.scale * log2_of_e,
                                      {call.window, call.document_begin, static_cast<int>(call.time)}};
  const dim3 grid(static_cast<unsigned>(call.heads), static_cast<unsigned>(call.batch),
                  static_cast<unsigned>(tiles_of(call.queries, shape.queries)));
  launch(stream, "flash_forward", flash_forward_kernel<T, head, masked>,
         {grid, static_cast<unsigned>(shape.threads()), static_cast<std::size_t>(shape.shared_bytes(head))},
         arguments);
}

template <class T, int head>
void launch_forward(Stream& stream, const AttentionCall& call) {
  if (call.mask(0).causal_only()) return launch_forward<T, head, false>(stream, call);
  launch_forward<T, head, true>(stream, call);
}

template <class T>
void launch_forward(Stream& stream, const AttentionCall& call) {
  if (call.head_width == 64) return launch_forward<T, 64>(stream, call);
  launch_forward<T, 128>(stream, call);
}

}  // namespace

void flash_forward(Stream& stream, const AttentionCall& call) {
  if (call.dtype == DataType::bfloat16) return launch_forward<bfloat16>(stream, call);
  launch_forward<float16>(stream, call);
}

}  // namespace tranche::kernels::cuda
