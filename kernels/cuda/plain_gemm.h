#pragma once
#include "kernels/cuda/gemm.h"

namespace tranche::kernels::cuda {

/// A GEMM without an epilogue, with m, n, k and batch above zero, by one kernel that supports any strides and
/// needs no workspace: fp32 sums in ascending k, rounded once. It is correct but slow, for GEMMs for which
/// cuBLASLt has no algorithm.
void plain_gemm(Stream& stream, const Gemm& gemm);

}  // namespace tranche::kernels::cuda
