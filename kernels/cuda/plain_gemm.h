#pragma once
#include "kernels/cuda/gemm.h"

namespace tranche::kernels::cuda {

/// A GEMM without an epilogue, m, n, k and batch above zero, by one kernel that takes any strides and needs
/// no workspace: sums of fp32 in ascending k, rounded once. Correct, not quick: for GEMMs that cuBLASLt has
/// no algorithm for.
void plain_gemm(Stream& stream, const Gemm& gemm);

}  // namespace tranche::kernels::cuda
