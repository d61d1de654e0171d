// Embedding. Compiled without contraction. Every sum adds fp32 numbers in the CPU's order, so the bits are
// the CPU's.
//
// Backward adds the rows of each token in ascending order, without atomics and without scratch memory. Token
// ids are divided into buckets (id modulo the number of buckets, which spreads the frequent low ids). A block
// has one bucket and a chunk of 128 bytes of columns. It reads all ids, collects the pairs (id, row) of its
// bucket in shared memory, sorts them, and gives each run of equal ids to a warp. The warp reads the table's
// row once, adds the rows of the run with 32 loads in flight, and writes the row back. If the list is full it
// is processed before the scan continues, which keeps the order.
//
// Costs beside the rows themselves: every block reads all ids, which is buckets * chunks * 4 bytes per token
// from the L2 cache. With 64 buckets and 768 columns of 16 bits it is 3 KB per token, beside 1.5 KB of
// gradient from memory and up to 6 KB of the table. The most frequent token is the longest chain: 5 % of 64k
// tokens are 3277 rows, about 80 us, beside some 100 us of memory time for all rows. The position table's
// gradient is a separate launch that reads d_out again.

#include <algorithm>

#include "kernels/cuda/elements.h"
#include "kernels/cuda/embedding.h"
#include "kernels/cuda/geometry.h"
#include "kernels/cuda/launch.h"

namespace tranche::kernels::cuda {

namespace {

constexpr int block_threads = 256;
constexpr int forward_rows = 4;  // rows whose loads a thread has in flight

/// The tokens whose rows are in the table (`first`, `count`); a count of -1 means all.
struct TokenRange {
  std::int64_t first = 0, count = -1;
  TokenRange(const ConstTensorView& table, std::int64_t first_token) {
    if (first_token == whole_vocabulary) return;
    first = first_token;
    count = table.shape[0];
  }
  __device__ __forceinline__ bool has(std::int64_t token) const {
    return count < 0 || (token >= first && token < first + count);
  }
};

/// Bytes per element: size(out) read from the token's row and size(out) written; a position table stays in
/// cache.
template <int width, class T>
__global__ void __launch_bounds__(block_threads)
    forward_kernel(const std::int32_t* tokens, const std::int32_t* positions, const Elements<T> token_table,
                   const Elements<T> position_table, const Elements<T> out, const TokenRange range,
                   const std::int64_t rows, const std::int64_t time, const std::int64_t columns) {
  const std::int64_t column = (std::int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * width;
  if (column >= columns) return;
  const std::int64_t first = std::int64_t{blockIdx.x} * blockDim.y * forward_rows + threadIdx.y;
  typename Elements<T>::template Loaded<width> token[forward_rows] = {}, position[forward_rows] = {};
#pragma unroll
  for (int u = 0; u < forward_rows; ++u) {
    const std::int64_t row = first + u * static_cast<int>(blockDim.y);
    if (row >= rows) break;
    if (!range.has(tokens[row])) continue;
    token[u] = token_table.template load<width>((tokens[row] - range.first) * columns + column);
    if (position_table.data != nullptr) {
      const std::int64_t at = positions == nullptr ? row % time : positions[row];
      position[u] = position_table.template load<width>(at * columns + column);
    }
  }
#pragma unroll
  for (int u = 0; u < forward_rows; ++u) {
    const std::int64_t row = first + u * static_cast<int>(blockDim.y);
    if (row >= rows) break;
    float a[width], b[width];
    Elements<T>::template widen<width>(token[u], a);
    Elements<T>::template widen<width>(position[u], b);
    if (position_table.data != nullptr) {
#pragma unroll
      for (int k = 0; k < width; ++k) a[k] = a[k] + b[k];
    }
    out.template store<width>(row * columns + column, a);
  }
}

/// A thread has columns of one position and adds the rows of that position, sample by sample, without tokens
/// outside the range. Bytes per element: size(d_out).
template <int width, class T>
__global__ void __launch_bounds__(block_threads)
    position_kernel(const std::int32_t* tokens, const TokenRange range, const Elements<T> d_out,
                    const Elements<float> gradient, const std::int64_t batch, const std::int64_t time,
                    const std::int64_t columns) {
  constexpr int together = 8;
  const std::int64_t column = (std::int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * width;
  const std::int64_t position = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (column >= columns || position >= time) return;
  float sum[width];
  Elements<float>::template widen<width>(gradient.template load<width>(position * columns + column), sum);
  for (std::int64_t b = 0; b < batch; b += together) {
    typename Elements<T>::template Loaded<width> loaded[together] = {};
#pragma unroll
    for (int u = 0; u < together; ++u) {
      if (b + u < batch)
        loaded[u] = d_out.template load<width>(((b + u) * time + position) * columns + column);
    }
#pragma unroll
    for (int u = 0; u < together; ++u) {
      if (b + u >= batch) break;
      if (range.count >= 0 && !range.has(tokens[(b + u) * time + position])) continue;
      float values[width];
      Elements<T>::template widen<width>(loaded[u], values);
#pragma unroll
      for (int k = 0; k < width; ++k) sum[k] = sum[k] + values[k];
    }
  }
  gradient.template store<width>(position * columns + column, sum);
}

constexpr int list_capacity = 2048;
constexpr int scan_tile = 2 * block_threads;  // ids scanned between two checks whether the list is full
constexpr int rows_under_way = 32;
constexpr int most_buckets = 64;
constexpr int tokens_each = 64;  // least number of tokens per bucket, on average

/// Sorts list[0, count) in ascending order by a bitonic network over the next power of two.
__device__ __forceinline__ void sort_list(unsigned long long* list, int count) {
  int size = 2;
  while (size < count) size *= 2;
  for (int i = count + static_cast<int>(threadIdx.x); i < size; i += block_threads) list[i] = ~0ull;
  for (int run = 2; run <= size; run *= 2) {
    for (int distance = run / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < size; i += block_threads) {
        const int partner = i ^ distance;
        if (partner <= i) continue;
        const unsigned long long a = list[i], b = list[partner];
        if ((a > b) == ((i & run) == 0)) {
          list[i] = b;
          list[partner] = a;
        }
      }
    }
  }
  __syncthreads();
}

/// Appends the entries of the bucket among `tile` tokens from `first` on to the list. Returns the list's new
/// length.
__device__ __forceinline__ int collect(const std::int32_t* tokens, const TokenRange& range,
                                       std::int64_t first, std::int64_t rows, unsigned buckets,
                                       unsigned bucket, unsigned long long* list, int* filled) {
#pragma unroll
  for (int k = 0; k < scan_tile / block_threads; ++k) {
    const std::int64_t row = first + k * block_threads + threadIdx.x;
    const auto token = row < rows ? static_cast<std::uint32_t>(tokens[row]) : 0u;
    const bool mine = row < rows && token % buckets == bucket && range.has(token);
    // The list is sorted by (id, row) later, so the order of entries does not matter here.
    const unsigned votes = __ballot_sync(0xffffffffu, mine);
    if (votes == 0) continue;
    int at = 0;
    if (threadIdx.x % warp_size == 0) at = atomicAdd(filled, __popc(votes));
    at = __shfl_sync(0xffffffffu, at, 0);
    const unsigned before = votes & ((1u << threadIdx.x % warp_size) - 1u);
    if (mine) {
      list[at + __popc(before)] =
          static_cast<unsigned long long>(token) << 32 | static_cast<std::uint32_t>(row);
    }
  }
  __syncthreads();
  const int count = *filled;
  __syncthreads();
  return count;
}

/// Adds rows list[begin, end), which belong to one token, to the token's row of the table.
template <int width, class T>
__device__ __forceinline__ void add_run(const unsigned long long* list, int begin, int end,
                                        const Elements<T>& d_out, const Elements<float>& table,
                                        std::int64_t first_token, std::int64_t columns, std::int64_t column) {
  if (column >= columns) return;
  const std::int64_t at = (static_cast<std::int64_t>(list[begin] >> 32) - first_token) * columns + column;
  float sum[width];
  Elements<float>::template widen<width>(table.template load<width>(at), sum);
  for (int base = begin; base < end; base += rows_under_way) {
    typename Elements<T>::template Loaded<width> loaded[rows_under_way] = {};
#pragma unroll
    for (int u = 0; u < rows_under_way; ++u) {
      if (base + u >= end) break;
      const auto row = static_cast<std::int64_t>(static_cast<std::uint32_t>(list[base + u]));
      loaded[u] = d_out.template load<width>(row * columns + column);
    }
#pragma unroll
    for (int u = 0; u < rows_under_way; ++u) {
      if (base + u >= end) break;
      float values[width];
      Elements<T>::template widen<width>(loaded[u], values);
#pragma unroll
      for (int k = 0; k < width; ++k) sum[k] = sum[k] + values[k];
    }
  }
  table.template store<width>(at, sum);
}

template <int width, class T>
__global__ void __launch_bounds__(block_threads)
    token_kernel(const std::int32_t* tokens, const TokenRange range, const Elements<T> d_out,
                 const Elements<float> table, const std::int64_t rows, const std::int64_t columns) {
  __shared__ unsigned long long list[list_capacity];
  __shared__ int filled;
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  const int warp = static_cast<int>(threadIdx.x) / warp_size;
  const std::int64_t column = (std::int64_t{blockIdx.y} * warp_size + lane) * width;
  if (threadIdx.x == 0) filled = 0;
  __syncthreads();
  for (std::int64_t first = 0; first < rows;) {
    int count = 0;
    do {
      count = collect(tokens, range, first, rows, gridDim.x, blockIdx.x, list, &filled);
      first += scan_tile;
    } while (first < rows && count + scan_tile <= list_capacity);
    sort_list(list, count);
    // Warp w processes the runs that start at entries w, w + 8 ...
    for (int begin = warp; begin < count; begin += block_threads / warp_size) {
      const unsigned long long token = list[begin] >> 32;
      if (begin > 0 && list[begin - 1] >> 32 == token) continue;
      int end = begin + 1;
      for (;;) {  // processes 32 entries at a time
        const bool same = end + lane < count && list[end + lane] >> 32 == token;
        const unsigned votes = __ballot_sync(0xffffffffu, same);
        end += votes == 0xffffffffu ? warp_size : __ffs(static_cast<int>(~votes)) - 1;
        if (votes != 0xffffffffu) break;
      }
      add_run<width>(list, begin, end, d_out, table, range.first, columns, column);
    }
    __syncthreads();
    if (threadIdx.x == 0) filled = 0;
    __syncthreads();
  }
}

/// A grid over [rows, columns]: blocks of columns in y, because there are fewer of them.
LaunchShape row_shape(std::int64_t rows, std::int64_t columns, int width, int rows_each) {
  const std::int64_t groups = divide_round_up(columns, width);
  const Tile tile = tile_of(groups, block_threads);
  return {.grid = dim3(static_cast<unsigned>(divide_round_up(rows, std::int64_t{tile.y} * rows_each)),
                       static_cast<unsigned>(divide_round_up(groups, tile.x))),
          .block = dim3(static_cast<unsigned>(tile.x), static_cast<unsigned>(tile.y))};
}

}  // namespace

void embedding_forward(Stream& stream, const ConstTensorView& tokens, const ConstTensorView& token_table,
                       const ConstTensorView& position_table, const TensorView& out,
                       const ConstTensorView& positions, std::int64_t first_token) {
  const TokenRange range(token_table, first_token);
  const std::int64_t rows = tokens.elements();
  const std::int64_t columns = token_table.shape[1];
  if (rows == 0 || columns == 0) return;
  with_storage(out.dtype, [&](auto storage) {
    using T = decltype(storage);
    constexpr int width = 16 / Elements<T>::bytes;
    const int fits =
        row_width(columns, width,
                  {demand_of(token_table.data, sizeof(T), width),
                   demand_of(position_table.data, sizeof(T), width), demand_of(out.data, sizeof(T), width)});
    launch(stream, "embedding_forward", fits == width ? forward_kernel<width, T> : forward_kernel<1, T>,
           row_shape(rows, columns, fits, forward_rows), tokens.as<std::int32_t>(),
           static_cast<const std::int32_t*>(positions.data), elements_of<T>(token_table),
           elements_of<T>(position_table), elements_of<T>(out), range, rows, tokens.shape[1], columns);
  });
}

void embedding_backward(Stream& stream, const ConstTensorView& tokens, const ConstTensorView& d_out,
                        const TensorView& token_gradient, const TensorView& position_gradient,
                        std::int64_t first_token) {
  const TokenRange range(token_gradient, first_token);
  constexpr const char* name = "embedding_backward";
  const std::int64_t rows = tokens.elements();
  const std::int64_t time = tokens.shape[1];
  const std::int64_t columns = token_gradient.shape[1];
  if (rows == 0 || columns == 0) return;
  with_storage(d_out.dtype, [&](auto storage) {
    using T = decltype(storage);
    const auto fits = [&](int width, const TensorView& table) {
      return row_width(columns, width,
                       {demand_of(d_out.data, sizeof(T), width), demand_of(table.data, 4, width)});
    };
    // The share of a warp in a row is 128 bytes: one fp32 number per lane, or two 16-bit ones.
    constexpr int width = 4 / Elements<T>::bytes;
    const int share = fits(width, token_gradient);
    const auto buckets =
        static_cast<unsigned>(std::clamp<std::int64_t>(divide_round_up(rows, tokens_each), 1, most_buckets));
    const auto chunks = static_cast<unsigned>(divide_round_up(columns, std::int64_t{share} * warp_size));
    launch(stream, name, share == width ? token_kernel<width, T> : token_kernel<1, T>,
           {.grid = dim3(buckets, chunks), .block = block_threads}, tokens.as<std::int32_t>(), range,
           elements_of<T>(d_out), elements_of<float>(token_gradient), rows, columns);
    if (position_gradient.shape.rank() == 0) return;
    const int group = fits(4, position_gradient);
    launch(stream, name, group == 4 ? position_kernel<4, T> : position_kernel<1, T>,
           row_shape(time, columns, group, 1), tokens.as<std::int32_t>(), range, elements_of<T>(d_out),
           elements_of<float>(position_gradient), rows / time, time, columns);
  });
}

}  // namespace tranche::kernels::cuda
