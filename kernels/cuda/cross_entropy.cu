// Cross-entropy in chunks of the vocabulary. Accumulation reads each logit once. A thread keeps a running
// maximum and the sum of exponentials relative to it, and rescales the sum when the maximum grows; threads
// are combined in a fixed tree.

#include <algorithm>
#include <limits>

#include "kernels/cuda/cross_entropy.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/geometry.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/simt.h"

namespace tranche::kernels::cuda {

namespace {

constexpr int block_threads = 256;
constexpr int groups_under_way = 4;
constexpr float infinity = std::numeric_limits<float>::infinity();

/// sum exp(x - maximum) over the numbers so far; {-infinity, 0} before the first.
struct Softmax {
  float maximum = -infinity;
  float sum = 0;

  /// The number subtracted before exponentials, for a maximum that is at least the present one. If all
  /// numbers are -infinity it is finite, so that their exponentials are 0 instead of NaN.
  __device__ __forceinline__ static float offset_of(float maximum) {
    return maximum == -infinity ? 0.0f : maximum;
  }
  __device__ __forceinline__ void raise(float to) {
    sum *= expf(maximum - offset_of(to));
    maximum = to;
  }
  __device__ __forceinline__ void merge(const Softmax& other) {
    const float highest = fmaxf(maximum, other.maximum);
    const float offset = offset_of(highest);
    sum = sum * expf(maximum - offset) + other.sum * expf(other.maximum - offset);
    maximum = highest;
  }
};

__global__ void __launch_bounds__(block_threads)
    begin_kernel(float* maximum, float* sum, float* target_logit, const std::int64_t rows) {
  const std::int64_t row = std::int64_t{blockIdx.x} * block_threads + threadIdx.x;
  if (row >= rows) return;
  maximum[row] = -infinity;
  sum[row] = 0;
  target_logit[row] = __uint_as_float(0x7fc00000u);  // NaN: a label that no chunk holds makes the loss NaN
}

/// A block computes a row. Bytes: 4 per logit, 28 per row.
template <int width>
__global__ void __launch_bounds__(block_threads)
    accumulate_kernel(const Elements<float> logits, const std::int32_t* targets, const std::int64_t columns,
                      const std::int64_t first_column, float* maximum, float* sum, float* target_logit) {
  __shared__ Softmax shared[block_threads / warp_size];
  const std::int64_t row = blockIdx.x;
  const std::int64_t start = row * columns;
  const std::int64_t groups = columns / width;
  Softmax mine;
  for (std::int64_t base = threadIdx.x; base < groups; base += groups_under_way * blockDim.x) {
    float values[groups_under_way][width];
#pragma unroll
    for (int u = 0; u < groups_under_way; ++u) {
      const std::int64_t group = base + u * static_cast<int>(blockDim.x);
      if (group < groups) {
        Elements<float>::widen<width>(logits.load<width>(start + group * width), values[u]);
      } else {
#pragma unroll
        for (float& value : values[u]) value = -infinity;
      }
    }
    float highest = mine.maximum;
#pragma unroll
    for (int u = 0; u < groups_under_way; ++u) {
#pragma unroll
      for (const float value : values[u]) highest = fmaxf(highest, value);
    }
    if (highest > mine.maximum) mine.raise(highest);
    const float offset = Softmax::offset_of(mine.maximum);
#pragma unroll
    for (int u = 0; u < groups_under_way; ++u) {
#pragma unroll
      for (const float value : values[u]) mine.sum += expf(value - offset);
    }
  }
#pragma unroll
  for (int distance = warp_size / 2; distance > 0; distance /= 2) {
    mine.merge({__shfl_xor_sync(0xffffffffu, mine.maximum, distance),
                __shfl_xor_sync(0xffffffffu, mine.sum, distance)});
  }
  if (threadIdx.x % warp_size == 0) shared[threadIdx.x / warp_size] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  Softmax total{maximum[row], sum[row]};
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / warp_size; ++warp) total.merge(shared[warp]);
  maximum[row] = total.maximum;
  sum[row] = total.sum;
  const std::int64_t column = targets[row] - first_column;
  if (column >= 0 && column < columns) target_logit[row] = *logits.at(start + column);
}

/// A thread combines the ranks' values of a row in order. Bytes: 12 per row and rank, 12 per row.
__global__ void __launch_bounds__(block_threads)
    combine_kernel(const float* states, const int ranks, const std::int64_t rows, float* maximum, float* sum,
                   float* target_logit) {
  const std::int64_t row = std::int64_t{blockIdx.x} * block_threads + threadIdx.x;
  if (row >= rows) return;
  Softmax total;
  float target = __uint_as_float(0x7fc00000u);
  for (int rank = 0; rank < ranks; ++rank) {
    const float* state = states + rank * 3 * rows + row;
    total.merge({state[0], state[rows]});
    if (!isnan(state[2 * rows])) target = state[2 * rows];
  }
  maximum[row] = total.maximum;
  sum[row] = total.sum;
  target_logit[row] = target;
}

/// One block: thread t adds rows t, t + 256 ... in order, then threads are added in a tree. 16 bytes per row.
__global__ void __launch_bounds__(block_threads)
    finish_kernel(const std::int32_t* targets, const float* maximum, const float* sum,
                  const float* target_logit, const std::int64_t rows, double* loss_sum,
                  std::int64_t* token_count) {
  __shared__ double losses[block_threads];
  __shared__ std::int64_t counts[block_threads];
  const int thread = static_cast<int>(threadIdx.x);
  double loss = 0;
  std::int64_t tokens = 0;
  for (std::int64_t row = thread; row < rows; row += block_threads) {
    if (targets[row] == ignored_label) continue;
    loss += log(static_cast<double>(sum[row])) + static_cast<double>(maximum[row]) -
            static_cast<double>(target_logit[row]);
    ++tokens;
  }
  losses[thread] = loss;
  counts[thread] = tokens;
  for (int half = block_threads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) {
      losses[thread] += losses[thread + half];
      counts[thread] += counts[thread + half];
    }
  }
  if (thread == 0) {
    *loss_sum += losses[0];
    *token_count += counts[0];
  }
}

/// Blocks in x are rows, in y ranges of columns. Bytes per logit: 4 + size(d_logits).
template <int width, class T>
__global__ void __launch_bounds__(block_threads)
    gradient_kernel(const Elements<float> logits, const std::int32_t* targets, const std::int64_t columns,
                    const std::int64_t first_column, const float* maximum, const float* sum,
                    const float scale, const Elements<T> d_logits) {
  const std::int64_t row = blockIdx.x;
  const std::int64_t start = row * columns;
  const std::int64_t groups = columns / width;
  const bool ignored = targets[row] == ignored_label;
  const std::int64_t target = targets[row] - first_column;
  const float highest = maximum[row];
  const float inverse_sum = 1.0f / sum[row];
  const std::int64_t base = std::int64_t{blockIdx.y} * blockDim.x * groups_under_way + threadIdx.x;
  typename Elements<float>::template Loaded<width> loaded[groups_under_way] = {};
#pragma unroll
  for (int u = 0; u < groups_under_way; ++u) {
    const std::int64_t group = base + u * static_cast<int>(blockDim.x);
    if (group < groups) loaded[u] = logits.load<width>(start + group * width);
  }
#pragma unroll
  for (int u = 0; u < groups_under_way; ++u) {
    const std::int64_t group = base + u * static_cast<int>(blockDim.x);
    if (group >= groups) break;
    float values[width];
    Elements<float>::widen<width>(loaded[u], values);
#pragma unroll
    for (int k = 0; k < width; ++k) {
      const float probability = expf(values[k] - highest) * inverse_sum;
      const float difference = group * width + k == target ? probability - 1.0f : probability;
      values[k] = ignored ? 0.0f : difference * scale;
    }
    d_logits.template store_fast<width>(start + group * width, values);
  }
}

unsigned threads_for(std::int64_t groups) {
  return static_cast<unsigned>(
      std::clamp<std::int64_t>(round_up(groups, warp_size), warp_size, block_threads));
}

}  // namespace

void cross_entropy_begin(Stream& stream, const CrossEntropyState& state) {
  const std::int64_t rows = state.maximum.elements();
  launch(stream, "cross_entropy_begin", begin_kernel,
         {.grid = static_cast<unsigned>(divide_round_up(rows, block_threads)), .block = block_threads},
         state.maximum.as<float>(), state.sum.as<float>(), state.target_logit.as<float>(), rows);
}

void cross_entropy_accumulate(Stream& stream, const ConstTensorView& logits, const ConstTensorView& targets,
                              std::int64_t first_column, const CrossEntropyState& state) {
  const std::int64_t rows = logits.shape[0], columns = logits.shape[1];
  if (columns == 0) return;
  constexpr int width = 4;
  const int fits = row_width(columns, width, {demand_of(logits.data, 4, width)});
  launch(stream, "cross_entropy_accumulate", fits == width ? accumulate_kernel<width> : accumulate_kernel<1>,
         {.grid = static_cast<unsigned>(rows), .block = threads_for(columns / fits)},
         elements_of<float>(logits), targets.as<std::int32_t>(), columns, first_column,
         state.maximum.as<float>(), state.sum.as<float>(), state.target_logit.as<float>());
}

void cross_entropy_combine(Stream& stream, const ConstTensorView& states, const CrossEntropyState& state) {
  const std::int64_t rows = state.maximum.elements();
  if (rows == 0) return;
  launch(stream, "cross_entropy_combine", combine_kernel,
         {.grid = static_cast<unsigned>(divide_round_up(rows, block_threads)), .block = block_threads},
         states.as<float>(), static_cast<int>(states.shape[0]), rows, state.maximum.as<float>(),
         state.sum.as<float>(), state.target_logit.as<float>());
}

void cross_entropy_finish(Stream& stream, const ConstTensorView& targets, const CrossEntropyState& state,
                          const TensorView& loss_sum, const TensorView& token_count) {
  launch(stream, "cross_entropy_finish", finish_kernel, {.grid = 1, .block = block_threads},
         targets.as<std::int32_t>(), state.maximum.as<float>(), state.sum.as<float>(),
         state.target_logit.as<float>(), state.maximum.elements(), loss_sum.as<double>(),
         token_count.as<std::int64_t>());
}

void cross_entropy_gradient(Stream& stream, const ConstTensorView& logits, const ConstTensorView& targets,
                            std::int64_t first_column, const CrossEntropyState& state, float scale,
                            const TensorView& d_logits) {
  const std::int64_t rows = logits.shape[0], columns = logits.shape[1];
  if (columns == 0) return;
  with_storage(d_logits.dtype, [&](auto storage) {
    using T = decltype(storage);
    constexpr int width = 4;
    const int fits = row_width(
        columns, width, {demand_of(logits.data, 4, width), demand_of(d_logits.data, sizeof(T), width)});
    const unsigned threads = threads_for(columns / fits);
    const auto ranges =
        static_cast<unsigned>(divide_round_up(columns / fits, std::int64_t{threads} * groups_under_way));
    launch(stream, "cross_entropy_gradient",
           fits == width ? gradient_kernel<width, T> : gradient_kernel<1, T>,
           {.grid = dim3(static_cast<unsigned>(rows), ranges), .block = threads}, elements_of<float>(logits),
           targets.as<std::int32_t>(), columns, first_column, state.maximum.as<float>(),
           state.sum.as<float>(), scale, elements_of<T>(d_logits));
  });
}

}  // namespace tranche::kernels::cuda
