#pragma once
/// Device-side building blocks for this folder's kernels, for which CUDA C++ has no portable spelling.
/// Everything else (threadIdx, __syncthreads, __shfl_xor_sync, __shared__ ...) is written as in any CUDA
/// source; the emulation of tests/cuda_emulation defines the same names.

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "tranche/core/dtype.h"

namespace tranche::kernels::cuda {

inline constexpr int warp_size = 32;

/// The block's dynamic shared memory, aligned to 128 bytes.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
#if defined(TRANCHE_CUDA_EMULATION)
  return static_cast<T*>(cuda_emulation::dynamic_shared());
#else
  extern __shared__ __align__(128) unsigned char tranche_dynamic_shared[];
  return reinterpret_cast<T*>(tranche_dynamic_shared);
#endif
}

/// 16 bytes at once: one ld.global.v4 / st.global.v4.
struct [[gnu::may_alias]] alignas(16) Vector16 {
  std::uint32_t words[4];
};

/// Copies 16 bytes from global to shared memory without passing through registers (cp.async, sm_80). Writes
/// zeros when `valid` is false (the source is not read). The copy is completed by cp_async_wait after
/// cp_async_commit; until a barrier it is visible to the issuing thread only.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid = true) {
#if defined(TRANCHE_CUDA_EMULATION)
  cuda_emulation::cp_async_16(shared, global, valid);
#else
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(address), "l"(global), "r"(bytes)
               : "memory");
#endif
}
__device__ __forceinline__ void cp_async_commit() {
#if defined(TRANCHE_CUDA_EMULATION)
  cuda_emulation::cp_async_commit();
#else
  asm volatile("cp.async.commit_group;\n" ::: "memory");
#endif
}
/// Waits until at most `pending` of this thread's newest groups are still in flight.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
#if defined(TRANCHE_CUDA_EMULATION)
  cuda_emulation::cp_async_wait(pending);
#else
  asm volatile("cp.async.wait_group %0;\n" ::"n"(pending) : "memory");
#endif
}

/// Loads four 8x8 matrices of 16-bit elements from shared memory (ldmatrix .x4): lane 8i + j gives the
/// address of row j of matrix i (16 bytes, 16-byte aligned); lane l receives row l / 4, columns 2 (l % 4) and
/// 2 (l % 4) + 1 of each matrix. With `transposed` each matrix is transposed on the way.
template <bool transposed>
__device__ __forceinline__ void load_matrix_x4(std::uint32_t (&fragment)[4], const void* shared_row) {
#if defined(TRANCHE_CUDA_EMULATION)
  cuda_emulation::load_matrix_x4(fragment, shared_row, transposed);
#else
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_row));
  if constexpr (transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(address)
                 : "memory");
  }
#endif
}

/// d = a b + d on tensor cores: a 16x16 (row), b 16x8 (column) of 16-bit elements, d 16x8 fp32. Fragments
/// follow PTX's definition for mma.m16n8k16: with g = lane / 4, t = lane % 4, a[0] = (g, 2t..2t+1), a[1] = (g
/// + 8, 2t..), a[2] = (g, 2t + 8..), a[3] = (g + 8, 2t + 8..); b[0] = rows 2t..2t+1 of column g, b[1] = rows
/// 2t + 8.. of column g; d[0..1] = (g, 2t..2t+1), d[2..3] = (g + 8, 2t..2t+1).
template <class T>
__device__ __forceinline__ void multiply_accumulate_16x8x16(float (&d)[4], const std::uint32_t (&a)[4],
                                                            std::uint32_t b0, std::uint32_t b1) {
#if defined(TRANCHE_CUDA_EMULATION)
  cuda_emulation::multiply_accumulate_16x8x16<T>(d, a, b0, b1);
#else
  if constexpr (std::is_same_v<T, bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#endif
}

/// Two fp32 numbers rounded to nearest even and packed, `low` in the low half (cvt.rn.bf16x2 / f16x2).
template <class T>
__device__ __forceinline__ std::uint32_t pack_two(float low, float high) {
#if defined(TRANCHE_CUDA_EMULATION)
  return static_cast<std::uint32_t>(from_float<T>(low).bits) |
         static_cast<std::uint32_t>(from_float<T>(high).bits) << 16;
#else
  std::uint32_t packed;
  if constexpr (std::is_same_v<T, bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
#endif
}

/// 2^x, error within 2 units in the last place (ex2.approx).
__device__ __forceinline__ float exponential_of_two(float x) {
#if defined(TRANCHE_CUDA_EMULATION)
  return __builtin_exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
#endif
}

}  // namespace tranche::kernels::cuda
