// Squared error. Compiled without contraction; rows and their sum are added in the CPU's order, so the bits
// are the CPU's. One block adds the rows, and its last step is a chain of one fp64 addition per row: it suits
// the outputs of small networks rather than large ones.

#include "kernels/cuda/elements.h"
#include "kernels/cuda/squared_error.h"
#include "kernels/cuda/vector_loop.h"

namespace tranche::kernels::cuda {

namespace {

__global__ void __launch_bounds__(vector_loop_threads)
    squared_error_kernel(const float* y, const float* target, const std::int64_t rows,
                         const std::int64_t columns, double* loss_sum, std::int64_t* row_count) {
  __shared__ double means[vector_loop_threads];
  double total = 0;
  for (std::int64_t first = 0; first < rows; first += vector_loop_threads) {
    const std::int64_t row = first + threadIdx.x;
    double sum = 0;
    if (row < rows) {
      for (std::int64_t c = 0; c < columns; ++c) {
        const double difference = double{y[row * columns + c]} - double{target[row * columns + c]};
        sum = sum + difference * difference;
      }
    }
    means[threadIdx.x] = sum / static_cast<double>(columns);
    __syncthreads();
    if (threadIdx.x == 0) {
      const int count = static_cast<int>(min(std::int64_t{vector_loop_threads}, rows - first));
      for (int i = 0; i < count; ++i) total = total + means[i];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    *loss_sum = *loss_sum + total;
    *row_count += rows;
  }
}

/// Bytes per element: 12.
struct Gradient {
  template <int n>
  struct Loaded {
    Elements<float>::Loaded<n> y, target;
  };
  Elements<float> y, target, d_y;
  float factor;

  template <int n>
  __device__ __forceinline__ Loaded<n> load(std::int64_t i) const {
    return {y.load<n>(i), target.load<n>(i)};
  }
  template <int n>
  __device__ __forceinline__ void finish(std::int64_t i, const Loaded<n>& loaded) const {
    float output[n], wanted[n];
    Elements<float>::widen<n>(loaded.y, output);
    Elements<float>::widen<n>(loaded.target, wanted);
#pragma unroll
    for (int k = 0; k < n; ++k) output[k] = factor * (output[k] - wanted[k]);
    d_y.store<n>(i, output);
  }
};

}  // namespace

void squared_error(Stream& stream, const ConstTensorView& y, const ConstTensorView& target,
                   const TensorView& loss_sum, const TensorView& row_count) {
  launch(stream, "squared_error", squared_error_kernel, {.grid = 1, .block = vector_loop_threads},
         y.as<float>(), target.as<float>(), y.shape[0], y.shape[1], loss_sum.as<double>(),
         row_count.as<std::int64_t>());
}

void squared_error_gradient(Stream& stream, const ConstTensorView& y, const ConstTensorView& target,
                            float scale, const TensorView& d_y) {
  if (d_y.elements() == 0) return;
  launch_vector_loop<4, 2>(
      stream, "squared_error_gradient",
      Gradient{elements_of<float>(y), elements_of<float>(target), elements_of<float>(d_y),
               2.0f * scale / static_cast<float>(y.shape[1])},
      vector_range(d_y.elements(), 4,
                   {demand_of(y.data, 4, 4), demand_of(target.data, 4, 4), demand_of(d_y.data, 4, 4)}));
}

}  // namespace tranche::kernels::cuda
