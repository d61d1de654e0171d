// GEMMs for which cuBLASLt has no algorithm. Copies of the operands with supported strides would need device
// memory that plans do not count; this kernel needs none.

#include "kernels/cuda/plain_gemm.h"

#include <algorithm>

#include "kernels/cuda/conversions.h"
#include "kernels/cuda/launch.h"

namespace tranche::kernels::cuda {

namespace {

constexpr int tile = 16;
constexpr std::int64_t most_blocks = 65535;  // in y and z of a grid

/// A stored matrix, read through op().
template <class T>
struct Operand {
  const T* data;
  std::int64_t next_row, next_column, next;
  __device__ __forceinline__ float at(std::int64_t matrix, std::int64_t row, std::int64_t column) const {
    return widened(data[matrix * next + row * next_row + column * next_column]);
  }
};

template <class T, class C>
__global__ void __launch_bounds__(tile* tile)
    plain_gemm_kernel(const Operand<T> a, const Operand<T> b, C* c, const std::int64_t m,
                      const std::int64_t n, const std::int64_t k, const std::int64_t batch,
                      const std::int64_t row_c, const std::int64_t next_c, const float alpha,
                      const float beta) {
  __shared__ float tile_a[tile][tile + 1];
  __shared__ float tile_b[tile][tile + 1];
  const std::int64_t column = std::int64_t{blockIdx.x} * tile + threadIdx.x;
  for (std::int64_t matrix = blockIdx.z; matrix < batch; matrix += gridDim.z) {
    for (std::int64_t first = std::int64_t{blockIdx.y} * tile; first < m;
         first += std::int64_t{gridDim.y} * tile) {
      const std::int64_t row = first + threadIdx.y;
      float sum = 0;
      for (std::int64_t begin = 0; begin < k; begin += tile) {
        const std::int64_t k_of_a = begin + threadIdx.x, k_of_b = begin + threadIdx.y;
        tile_a[threadIdx.y][threadIdx.x] = row < m && k_of_a < k ? a.at(matrix, row, k_of_a) : 0.0f;
        tile_b[threadIdx.y][threadIdx.x] = k_of_b < k && column < n ? b.at(matrix, k_of_b, column) : 0.0f;
        __syncthreads();
        const int count = static_cast<int>(min(std::int64_t{tile}, k - begin));
        for (int i = 0; i < count; ++i) sum += tile_a[threadIdx.y][i] * tile_b[i][threadIdx.x];
        __syncthreads();
      }
      if (row < m && column < n) {
        C& out = c[matrix * next_c + row * row_c + column];
        const float scaled = alpha * sum;
        out = narrowed<C>(beta == 0.0f ? scaled : scaled + beta * widened(out));
      }
    }
  }
}

template <class T, class C>
void launch_plain(Stream& stream, const Gemm& p) {
  const auto operand = [](const void* data, bool transposed, std::int64_t row, std::int64_t next) {
    return Operand<T>{static_cast<const T*>(data), transposed ? 1 : row, transposed ? row : 1, next};
  };
  const auto blocks = [](std::int64_t elements) { return (elements + tile - 1) / tile; };
  launch(stream, "plain_gemm", plain_gemm_kernel<T, C>,
         {.grid = dim3(static_cast<unsigned>(blocks(p.n)),
                       static_cast<unsigned>(std::min(blocks(p.m), most_blocks)),
                       static_cast<unsigned>(std::min(p.batch, most_blocks))),
          .block = dim3(tile, tile)},
         operand(p.a, p.transpose_a, p.row_a, p.next_a), operand(p.b, p.transpose_b, p.row_b, p.next_b),
         static_cast<C*>(p.c), p.m, p.n, p.k, p.batch, p.row_c, p.next_c, p.alpha, p.beta);
}

template <class T>
void launch_into(Stream& stream, const Gemm& p) {
  if (p.c_dtype == DataType::float32) {
    launch_plain<T, float>(stream, p);
  } else {
    launch_plain<T, T>(stream, p);
  }
}

}  // namespace

void plain_gemm(Stream& stream, const Gemm& gemm) {
  switch (gemm.dtype) {
    case DataType::bfloat16:
      return launch_into<bfloat16>(stream, gemm);
    case DataType::float16:
      return launch_into<float16>(stream, gemm);
    default:
      return launch_plain<float, float>(stream, gemm);
  }
}

}  // namespace tranche::kernels::cuda
