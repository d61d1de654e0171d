#pragma once
/// GEMM through cuBLASLt, for matmul and for attention without a fused kernel. It uses no CUDA type, so that
/// dispatchers may include it.

#include <compare>
#include <cstdint>

#include "tranche/core/dtype.h"
#include "tranche/device/stream.h"
#include "tranche/kernels/workspace.h"

namespace tranche::kernels::cuda {

/// The operation on a b + c before it is stored.
enum class Epilogue : std::uint8_t {
  none,
  bias,           ///< + bias[n], rounded once with the sum
  bias_gelu,      ///< auxiliary = a b + bias, c = gelu(a b + bias) of the unrounded sum
  gelu_backward,  ///< c = a b * gelu'(auxiliary)
};

/// c[m, n] = alpha op(a)[m, k] op(b)[k, n] + beta c, row-major, `batch` times. Rows of the stored matrices
/// are `row_*` elements apart, the matrices of the batch `next_*`.
struct Gemm {
  bool transpose_a = false;  ///< a is stored [k, m]
  bool transpose_b = false;  ///< b is stored [n, k]
  std::int64_t m = 0, n = 0, k = 0;
  DataType dtype = DataType::float32;    ///< of a and b
  DataType c_dtype = DataType::float32;  ///< `dtype` or fp32
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
  std::int64_t row_a = 0, row_b = 0, row_c = 0;
  std::int64_t batch = 1;
  std::int64_t next_a = 0, next_b = 0, next_c = 0;
  float alpha = 1.0f;
  float beta = 0.0f;
  Epilogue epilogue = Epilogue::none;
  const void* bias = nullptr;  ///< [n] of c's dtype
  void* auxiliary = nullptr;   ///< [m, n] of c's dtype, rows row_c apart
};

/// Makes a GEMM of dense operands.
constexpr Gemm dense(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k) {
  Gemm gemm;
  gemm.transpose_a = transpose_a;
  gemm.transpose_b = transpose_b;
  gemm.m = m;
  gemm.n = n;
  gemm.k = k;
  gemm.row_a = transpose_a ? m : k;
  gemm.row_b = transpose_b ? k : n;
  gemm.row_c = n;
  return gemm;
}

/// The largest power of two up to 16 that divides an address and its strides in bytes. The choice of
/// algorithm uses this and nothing else of the address: 16 bytes suffice for a 128-bit load or a bulk copy,
/// and the address at which the engine puts a tensor (which depends on stages and tiers) must not change the
/// bits.
constexpr std::uint32_t gemm_alignment(std::uint64_t address, std::int64_t row_bytes,
                                       std::int64_t next_bytes) {
  const std::uint64_t bits =
      address | static_cast<std::uint64_t>(row_bytes) | static_cast<std::uint64_t>(next_bytes) | 16u;
  return static_cast<std::uint32_t>(bits & (~bits + 1));
}

/// Everything on which the choice of an algorithm depends.
struct GemmKey {
  bool transpose_a, transpose_b, accumulate;
  std::int64_t m, n, k;
  DataType dtype, c_dtype;
  std::int64_t row_a, row_b, row_c, batch, next_a, next_b, next_c;
  Epilogue epilogue;
  std::uint32_t align_a, align_b, align_c, align_bias, align_auxiliary;
  std::int64_t workspace_bytes;
  friend auto operator<=>(const GemmKey&, const GemmKey&) = default;
};
GemmKey key_of(const Gemm& gemm, std::int64_t workspace_bytes);

/// True when cuBLASLt supports the epilogue: GELU's matrix has rows of a multiple of 8 elements and is
/// aligned to 16 bytes.
bool epilogue_possible(const Gemm& gemm);

/// Issues the GEMM; m, n, k and batch may be zero (with k = 0 the result is beta c, and no epilogue is
/// allowed). Returns false, having done nothing, if no algorithm within the workspace supports the epilogue.
/// Without an epilogue, a plain kernel (plain_gemm.h) handles cases that cuBLASLt cannot. fp32 is IEEE fp32
/// throughout (no TF32); 16-bit operands are summed in fp32. Sums may be split over k only if their parts
/// stay in fp32 and are added in a separate pass in fixed order, so the same call gives the same bits.
[[nodiscard]] bool try_gemm(Stream& stream, const Gemm& gemm, const Workspace& workspace);
void gemm(Stream& stream, const Gemm& gemm, const Workspace& workspace);

}  // namespace tranche::kernels::cuda
