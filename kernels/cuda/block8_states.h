#pragma once
/// Optimizer states in blocks of core/block8.h. A warp has a whole block in registers: element 32 k + lane is
/// the lane's k-th, so that codes are read and written 32 bytes at a time, and the greatest magnitude takes
/// five exchanges. All lanes of a warp must make every call.

#include <cstdint>

#include "core/block8.h"
#include "kernels/cuda/simt.h"
#include "tranche/core/tensor_view.h"

namespace tranche::kernels::cuda {

inline constexpr int block8_each = static_cast<int>(block8_elements) / warp_size;

static __device__ constexpr detail::Block8Map block8_maps[2] = {detail::make_block8_map<false>(),
                                                                detail::make_block8_map<true>()};

struct Block8State {
  unsigned char* data;
  bool with_sign;

  /// `first` is the first element of a block.
  __device__ __forceinline__ unsigned char* block_at(std::int64_t first) const {
    return data + first / block8_elements * block8_bytes;
  }

  __device__ __forceinline__ void load(std::int64_t first, float (&values)[block8_each]) const {
    const unsigned char* const block = block_at(first);
    const float scale = *reinterpret_cast<const float*>(block + block8_elements);
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
#pragma unroll
    for (int k = 0; k < block8_each; ++k) {
      values[k] = block8_maps[with_sign ? 1 : 0].values[block[warp_size * k + lane]] * scale;
    }
  }

  /// Stores the first `count` elements, and code 0 for the others; afterwards `values` are the stored values,
  /// as load() would return them.
  __device__ __forceinline__ void store(std::int64_t first, int count, float (&values)[block8_each]) const {
    unsigned char* const block = block_at(first);
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    std::uint32_t greatest = 0;
#pragma unroll
    for (int k = 0; k < block8_each; ++k) {
      if (warp_size * k + lane < count) greatest = max(greatest, detail::block8_magnitude(values[k]));
    }
#pragma unroll
    for (int distance = warp_size / 2; distance > 0; distance /= 2) {
      greatest = max(greatest, __shfl_xor_sync(0xffffffffu, greatest, distance));
    }
    const float scale = __uint_as_float(greatest);
    const detail::Block8Shares share_of = detail::block8_shares(scale);
#pragma unroll
    for (int k = 0; k < block8_each; ++k) {
      const int i = warp_size * k + lane;
      std::int32_t code = with_sign ? detail::block8_zero<true> : detail::block8_zero<false>;
      if (i < count) {
        const float share = share_of(values[k]);
        code = with_sign ? detail::block8_code<true>(share) : detail::block8_code<false>(share);
      }
      block[i] = static_cast<unsigned char>(code);
      values[k] = block8_maps[with_sign ? 1 : 0].values[code] * scale;
    }
    if (lane == 0) *reinterpret_cast<float*>(block + block8_elements) = scale;
  }
};

inline Block8State block8_state_of(const TensorView& view) {
  return {static_cast<unsigned char*>(view.data), view.dtype == DataType::block8};
}

}  // namespace tranche::kernels::cuda
