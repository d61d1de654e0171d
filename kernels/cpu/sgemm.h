#pragma once
/// fp32 GEMM of tiles on the calling thread, for matmul and attention. It uses oneDNN on CPUs with AVX-512
/// and if OpenBLAS has no kernels for the CPU, else OpenBLAS; or plain loops in builds with
/// TRANCHE_PLAIN_KERNELS.

#include <cstdint>
#include <string>
#include <string_view>

namespace tranche::kernels::cpu {

/// c[m, n] = alpha op(a) op(b) + beta c, row-major; strides in elements between stored rows. With beta 0 the
/// old c is not read. The same arguments give the same bits.
struct SgemmArguments {
  bool transpose_a = false;
  bool transpose_b = false;
  std::int64_t m = 0, n = 0, k = 0;
  float alpha = 1;
  const float* a = nullptr;
  std::int64_t stride_a = 0;
  const float* b = nullptr;
  std::int64_t stride_b = 0;
  float beta = 0;
  float* c = nullptr;
  std::int64_t stride_c = 0;
};
void sgemm(const SgemmArguments& arguments);

/// "OpenBLAS sgemm", "oneDNN sgemm" or "plain loops".
std::string_view sgemm_path();
/// Library, version and kernel set, for the numerics fingerprint.
std::string sgemm_library();

}  // namespace tranche::kernels::cpu
