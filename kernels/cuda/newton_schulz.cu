// Newton-Schulz iterations without their GEMMs: these kernels are bound by memory and short beside the GEMMs.
// The norm is a sum of row sums; a warp computes each in fp64 in a fixed tree, and every thread block adds
// them in the same order. A block with few singular values is computed by one thread block.

#include "kernels/cuda/newton_schulz.h"

#include "kernels/cpu/newton_schulz.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/geometry.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/reduce.h"

namespace tranche::kernels::cuda {

namespace {

constexpr int threads = 256;
constexpr int warps = threads / warp_size;
constexpr int few = static_cast<int>(cpu::newton_schulz_few);

/// A block of a matrix whose rows are `stride` elements apart.
template <class T>
struct BlockElements {
  Elements<T> elements;
  std::int64_t first, stride, rows, columns;

  __device__ __forceinline__ float load(std::int64_t row, std::int64_t column) const {
    float value[1];
    Elements<T>::template widen<1>(elements.template load<1>(first + row * stride + column), value);
    return value[0];
  }
  __device__ __forceinline__ void store(std::int64_t row, std::int64_t column, float value) const {
    const float values[1] = {value};
    elements.template store<1>(first + row * stride + column, values);
  }
};

template <class T>
BlockElements<T> block_elements(const ConstTensorView& matrix, const MatrixBlock& block) {
  const std::int64_t stride = matrix.shape[1];
  return {elements_of<T>(matrix), block.row * stride + block.column, stride, block.rows, block.columns};
}

unsigned blocks_for(std::int64_t items) {
  return grid_blocks(items, threads, multiprocessors(), 8);
}

template <class T>
__global__ void __launch_bounds__(threads) row_sums_kernel(const BlockElements<T> block, double* sums) {
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  const std::int64_t step = std::int64_t{gridDim.x} * warps;
  for (std::int64_t row = blockIdx.x * std::int64_t{warps} + threadIdx.x / warp_size; row < block.rows;
       row += step) {
    double sum = 0;
    for (std::int64_t column = lane; column < block.columns; column += warp_size) {
      const auto element = static_cast<double>(block.load(row, column));
      sum += element * element;
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[row] = sum;
  }
}

/// Returns the sum of `value` over the block's threads to all of them.
__device__ __forceinline__ double sum_of_block(double value, double* shared) {
  value = warp_sum(value);
  __syncthreads();
  if (threadIdx.x % warp_size == 0) shared[threadIdx.x / warp_size] = value;
  __syncthreads();
  value = shared[0];
  for (int warp = 1; warp < warps; ++warp) value += shared[warp];
  return value;
}

template <class T>
__global__ void __launch_bounds__(threads)
    normalize_kernel(const BlockElements<T> block, const double* sums, const double factor,
                     const double least, float* x) {
  __shared__ double shared[warps];
  double sum = 0;
  for (std::int64_t row = threadIdx.x; row < block.rows; row += threads) sum += sums[row];
  sum = sum_of_block(sum, shared);
  const double divisor = factor * sqrt(sum);
  const auto inverse = static_cast<float>(1 / (divisor > least ? divisor : least));
  const std::int64_t elements = block.rows * block.columns, step = std::int64_t{gridDim.x} * threads;
  for (std::int64_t i = blockIdx.x * std::int64_t{threads} + threadIdx.x; i < elements; i += step) {
    x[i] = block.load(i / block.columns, i % block.columns) * inverse;
  }
}

template <class T>
__global__ void __launch_bounds__(threads)
    store_kernel(const float* x, const float scale, const BlockElements<T> block) {
  const std::int64_t elements = block.rows * block.columns, step = std::int64_t{gridDim.x} * threads;
  for (std::int64_t i = blockIdx.x * std::int64_t{threads} + threadIdx.x; i < elements; i += step) {
    block.store(i / block.columns, i % block.columns, scale * x[i]);
  }
}

__global__ void __launch_bounds__(threads)
    scaled_sum_kernel(const float x_factor, const float* x, const float y_factor, const float* y, float* out,
                      const std::int64_t elements) {
  const std::int64_t step = std::int64_t{gridDim.x} * threads;
  for (std::int64_t i = blockIdx.x * std::int64_t{threads} + threadIdx.x; i < elements; i += step) {
    out[i] = x_factor * x[i] + y_factor * y[i];
  }
}

struct Steps {
  double factors[newton_schulz_most_steps][3];
  int count;
};

/// x is [few_rows, many], with few_rows at most `few`; it is the block of the matrix or its transpose.
template <class T>
__global__ void __launch_bounds__(threads)
    few_kernel(const Steps steps, const double factor, const double least, const double scale,
               const BlockElements<T> block, double* x) {
  __shared__ double shared[warps], factors[few][few];
  const bool wide = block.rows <= block.columns;
  const auto rows = static_cast<int>(wide ? block.rows : block.columns);
  const std::int64_t many = wide ? block.columns : block.rows;
  double sum = 0;
  for (int i = 0; i < rows; ++i) {
    for (std::int64_t j = threadIdx.x; j < many; j += threads) {
      const double element = wide ? block.load(i, j) : block.load(j, i);
      x[i * many + j] = element;
      sum += element * element;
    }
  }
  const double divisor = factor * sqrt(sum_of_block(sum, shared));
  const double inverse = 1 / (divisor > least ? divisor : least);
  // A thread processes the same columns of x in all steps.
  for (int i = 0; i < rows; ++i) {
    for (std::int64_t j = threadIdx.x; j < many; j += threads) x[i * many + j] *= inverse;
  }
  for (int step = 0; step < steps.count; ++step) {
    const double a = steps.factors[step][0], b = steps.factors[step][1], c = steps.factors[step][2];
    double gram[few][few] = {};
    for (int i = 0; i < rows; ++i) {
      for (int k = 0; k < rows; ++k) {
        double product = 0;
        for (std::int64_t j = threadIdx.x; j < many; j += threads)
          product += x[i * many + j] * x[k * many + j];
        gram[i][k] = sum_of_block(product, shared);
      }
    }
    if (threadIdx.x == 0) {
      for (int i = 0; i < rows; ++i) {
        for (int k = 0; k < rows; ++k) {
          double square = 0;
          for (int l = 0; l < rows; ++l) square += gram[i][l] * gram[l][k];
          factors[i][k] = (i == k ? a : 0) + b * gram[i][k] + c * square;
        }
      }
    }
    __syncthreads();
    for (std::int64_t j = threadIdx.x; j < many; j += threads) {
      double column[few] = {};
      for (int i = 0; i < rows; ++i) {
        for (int k = 0; k < rows; ++k) column[i] += factors[i][k] * x[k * many + j];
      }
      for (int i = 0; i < rows; ++i) x[i * many + j] = column[i];
    }
  }
  for (int i = 0; i < rows; ++i) {
    for (std::int64_t j = threadIdx.x; j < many; j += threads) {
      const auto value = static_cast<float>(scale * x[i * many + j]);
      if (wide) {
        block.store(i, j, value);
      } else {
        block.store(j, i, value);
      }
    }
  }
}

}  // namespace

void normalized_block(Stream& stream, const ConstTensorView& matrix, const MatrixBlock& block, double factor,
                      double least, float* x, double* row_sums) {
  with_storage(matrix.dtype, [&](auto storage) {
    using T = decltype(storage);
    const BlockElements<T> elements = block_elements<T>(matrix, block);
    launch(stream, "newton_schulz_norm", row_sums_kernel<T>,
           {.grid = grid_blocks(block.rows, warps, multiprocessors(), 8), .block = threads}, elements,
           row_sums);
    launch(stream, "newton_schulz_begin", normalize_kernel<T>,
           {.grid = blocks_for(block.rows * block.columns), .block = threads}, elements, row_sums, factor,
           least, x);
  });
}

void store_block(Stream& stream, const float* x, float scale, const TensorView& matrix,
                 const MatrixBlock& block) {
  with_storage(matrix.dtype, [&](auto storage) {
    using T = decltype(storage);
    launch(stream, "newton_schulz_end", store_kernel<T>,
           {.grid = blocks_for(block.rows * block.columns), .block = threads}, x, scale,
           block_elements<T>(matrix, block));
  });
}

void scaled_sum(Stream& stream, float x_factor, const TensorView& x, float y_factor, const TensorView& y,
                const TensorView& out) {
  launch(stream, "newton_schulz_sum", scaled_sum_kernel,
         {.grid = blocks_for(out.elements()), .block = threads}, x_factor, x.as<float>(), y_factor,
         y.as<float>(), out.as<float>(), out.elements());
}

void few_singular_values(Stream& stream, std::span<const NewtonSchulzStep> steps, double factor, double least,
                         double scale, const TensorView& matrix, const MatrixBlock& block, double* x) {
  Steps of{};
  for (const NewtonSchulzStep& step : steps) {
    for (std::size_t k = 0; k < 3; ++k) of.factors[of.count][k] = step[k];
    ++of.count;
  }
  with_storage(matrix.dtype, [&](auto storage) {
    using T = decltype(storage);
    launch(stream, "newton_schulz", few_kernel<T>, {.grid = 1, .block = threads}, of, factor, least, scale,
           block_elements<T>(matrix, block), x);
  });
}

}  // namespace tranche::kernels::cuda
