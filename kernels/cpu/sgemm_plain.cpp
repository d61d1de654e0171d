#include "kernels/cpu/sgemm.h"

namespace tranche::kernels::cpu {

void sgemm(const SgemmArguments& arguments) {
  const SgemmArguments& s = arguments;
  const std::int64_t a_row = s.transpose_a ? 1 : s.stride_a, a_column = s.transpose_a ? s.stride_a : 1;
  const std::int64_t b_row = s.transpose_b ? 1 : s.stride_b, b_column = s.transpose_b ? s.stride_b : 1;
  for (std::int64_t i = 0; i < s.m; ++i) {
    float* row = s.c + i * s.stride_c;
    for (std::int64_t j = 0; j < s.n; ++j) row[j] = s.beta == 0.0f ? 0.0f : s.beta * row[j];
    for (std::int64_t p = 0; p < s.k; ++p) {
      const float factor = s.alpha * s.a[i * a_row + p * a_column];
      for (std::int64_t j = 0; j < s.n; ++j) row[j] += factor * s.b[p * b_row + j * b_column];
    }
  }
}

std::string_view sgemm_path() {
  return "plain loops";
}

std::string sgemm_library() {
  return "plain loops";
}

}  // namespace tranche::kernels::cpu
