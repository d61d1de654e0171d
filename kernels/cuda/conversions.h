#pragma once
/// Conversions of single elements with the bits of core's; fp16 uses the hardware, which differs only in
/// NaNs.

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "tranche/core/dtype.h"

namespace tranche::kernels::cuda {

__device__ __forceinline__ float widened(float value) {
  return value;
}
__device__ __forceinline__ float widened(bfloat16 value) {
  return to_float(value);
}
__device__ __forceinline__ float widened(float16 value) {
#if defined(TRANCHE_CUDA_EMULATION)
  return to_float(value);
#else
  float wide;
  asm("cvt.f32.f16 %0, %1;\n" : "=f"(wide) : "h"(value.bits));
  return wide == wide ? wide : to_float(value);
#endif
}
template <class T>
__device__ __forceinline__ T narrowed(float value) {
#if !defined(TRANCHE_CUDA_EMULATION)
  if constexpr (std::is_same_v<T, float16>) {
    float16 half;
    asm("cvt.rn.f16.f32 %0, %1;\n" : "=h"(half.bits) : "f"(value));
    const std::uint32_t bits = __float_as_uint(value);
    const auto nan = static_cast<std::uint16_t>((bits >> 16 & 0x8000u) | 0x7e00u | (bits >> 13 & 0x03ffu));
    return {value == value ? half.bits : nan};
  }
#endif
  return from_float<T>(value);
}

}  // namespace tranche::kernels::cuda
