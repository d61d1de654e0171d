// int8 blocks. A warp processes a block of 256 elements; a lane has 4 neighbouring elements of each half, so
// that codes are read and written as 4-byte words and the 260 bytes of a block need no larger alignment.
// Compiled without contraction; the arithmetic is that of block_codes.h, so the bits are the CPU's. Bytes per
// element: quantize and dequantize size(values) + 260/256; the sum ranks * 260/256 + size(out), and size(out)
// again to accumulate.

#include "kernels/block_codes.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/geometry.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/quantization.h"

namespace tranche::kernels::cuda {

namespace {

constexpr int threads = 256;
constexpr int warps = threads / warp_size;
constexpr int halves = 2;
constexpr int each = 4;  // elements of a lane in each half

/// The place of a lane's elements in a half of a block.
__device__ __forceinline__ int place(int half) {
  return half * (warp_size * each) + static_cast<int>(threadIdx.x) % warp_size * each;
}

__device__ __forceinline__ float scale_of(const unsigned char* block) {
  return std::bit_cast<float>(*reinterpret_cast<const std::uint32_t*>(block + quantized_block));
}

__device__ __forceinline__ void block_values(const unsigned char* block, int half, float scale,
                                             float (&values)[each]) {
  const std::uint32_t codes = *reinterpret_cast<const std::uint32_t*>(block + place(half));
#pragma unroll
  for (int k = 0; k < each; ++k) {
    values[k] = block_value(static_cast<std::int8_t>(codes >> (8 * k) & 0xffu), scale);
  }
}

/// Calls body(block) for the blocks of this warp.
template <class Body>
__device__ __forceinline__ void for_each_block(std::int64_t blocks, const Body& body) {
  const std::int64_t step = std::int64_t{gridDim.x} * warps;
  for (std::int64_t b = blockIdx.x * std::int64_t{warps} + threadIdx.x / warp_size; b < blocks; b += step) {
    body(b);
  }
}

template <class Values>
__global__ void __launch_bounds__(threads)
    quantize_kernel(const Values values, unsigned char* blocks, const std::int64_t count) {
  for_each_block(count, [&](std::int64_t b) {
    float held[halves][each];
    std::uint32_t greatest = 0;
#pragma unroll
    for (int half = 0; half < halves; ++half) {
      Values::template widen<each>(values.template load<each>(b * quantized_block + place(half)), held[half]);
#pragma unroll
      for (int k = 0; k < each; ++k) {
        greatest = max(greatest, std::bit_cast<std::uint32_t>(held[half][k]) & 0x7fffffffu);
      }
    }
#pragma unroll
    for (int distance = warp_size / 2; distance > 0; distance /= 2) {
      greatest = max(greatest, __shfl_xor_sync(0xffffffffu, greatest, distance));
    }
    const BlockScale scale = block_scale(greatest);
    const bool finite = finite_magnitude(greatest);
    unsigned char* const block = blocks + b * quantized_block_bytes;
#pragma unroll
    for (int half = 0; half < halves; ++half) {
      std::uint32_t codes = 0;
#pragma unroll
      for (int k = 0; k < each; ++k) {
        const int code = finite ? block_code(held[half][k], scale.inverse) : broken_block_code(held[half][k]);
        codes |= (static_cast<std::uint32_t>(code) & 0xffu) << (8 * k);
      }
      *reinterpret_cast<std::uint32_t*>(block + place(half)) = codes;
    }
    if (threadIdx.x % warp_size == 0) {
      *reinterpret_cast<std::uint32_t*>(block + quantized_block) = std::bit_cast<std::uint32_t>(scale.scale);
    }
  });
}

template <class Values>
__global__ void __launch_bounds__(threads)
    dequantize_kernel(const unsigned char* blocks, const Values values, const std::int64_t count) {
  for_each_block(count, [&](std::int64_t b) {
    const unsigned char* const block = blocks + b * quantized_block_bytes;
    const float scale = scale_of(block);
#pragma unroll
    for (int half = 0; half < halves; ++half) {
      float read[each];
      block_values(block, half, scale, read);
      values.template store<each>(b * quantized_block + place(half), read);
    }
  });
}

template <class Out>
__global__ void __launch_bounds__(threads)
    quantized_sum_kernel(const unsigned char* pieces, const int ranks, const SumGroups groups,
                         const bool accumulate, const Out out, const std::int64_t count) {
  const std::int64_t stride = count * quantized_block_bytes;
  const bool folds = groups.size <= 0 && accumulate;
  const int group = max(abs(groups.size), 1);
  for_each_block(count, [&](std::int64_t b) {
#pragma unroll
    for (int half = 0; half < halves; ++half) {
      const std::int64_t first = b * quantized_block + place(half);
      float total[each] = {}, outer[each] = {}, partial[each] = {}, held[each] = {};
      if (accumulate) Out::template widen<each>(out.template load<each>(first), held);
      // Every sum starts with its first operand itself, because 0 + -0 would lose the sign.
      int in_group = 0, in_outer = 0;
      bool first_outer = true;
      if (folds) {
        first_outer = false;
#pragma unroll
        for (int k = 0; k < each; ++k) total[k] = held[k];
      }
      for (int rank = 0; rank < ranks; ++rank) {
        const unsigned char* const block = pieces + rank * stride + b * quantized_block_bytes;
        float read[each];
        block_values(block, half, scale_of(block), read);
#pragma unroll
        for (int k = 0; k < each; ++k) partial[k] = in_group == 0 ? read[k] : partial[k] + read[k];
        if (++in_group < group && rank + 1 < ranks) continue;
        in_group = 0;
#pragma unroll
        for (int k = 0; k < each; ++k) outer[k] = in_outer == 0 ? partial[k] : outer[k] + partial[k];
        if (++in_outer < groups.outer && rank + 1 < ranks) continue;
        in_outer = 0;
#pragma unroll
        for (int k = 0; k < each; ++k) total[k] = first_outer ? outer[k] : total[k] + outer[k];
        first_outer = false;
      }
      if (accumulate && !folds) {
#pragma unroll
        for (int k = 0; k < each; ++k) total[k] = held[k] + total[k];
      }
      out.template store<each>(first, total);
    }
  });
}

LaunchShape shape_of(std::int64_t blocks) {
  return {.grid = grid_blocks(blocks, warps, multiprocessors(), 8), .block = threads};
}

}  // namespace

void quantize(Stream& stream, const ConstTensorView& values, void* blocks) {
  const std::int64_t count = values.elements() / quantized_block;
  with_storage(values.dtype, [&](auto storage) {
    using Values = Elements<decltype(storage)>;
    launch(stream, "quantize", quantize_kernel<Values>, shape_of(count),
           Values{const_cast<void*>(values.data)}, static_cast<unsigned char*>(blocks), count);
  });
}

void dequantize(Stream& stream, const void* blocks, const TensorView& values) {
  const std::int64_t count = values.elements() / quantized_block;
  with_storage(values.dtype, [&](auto storage) {
    using Values = Elements<decltype(storage)>;
    launch(stream, "dequantize", dequantize_kernel<Values>, shape_of(count),
           static_cast<const unsigned char*>(blocks), Values{values.data}, count);
  });
}

void quantized_sum(Stream& stream, const void* pieces, int ranks, SumGroups groups, bool accumulate,
                   const TensorView& out) {
  const std::int64_t count = out.elements() / quantized_block;
  with_storage(out.dtype, [&](auto storage) {
    using Out = Elements<decltype(storage)>;
    launch(stream, "quantized_sum", quantized_sum_kernel<Out>, shape_of(count),
           static_cast<const unsigned char*>(pieces), ranks, groups, accumulate, Out{out.data}, count);
  });
}

}  // namespace tranche::kernels::cuda
