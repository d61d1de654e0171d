#pragma once
#include "kernels/cuda/product.h"

namespace tranche::kernels::cuda {

/// The product without an epilogue, m, n, k and batch above zero, by one kernel that takes any strides and
/// needs no workspace: sums of fp32 in ascending k, rounded once. Correct, not quick: for products that
/// cuBLASLt has no algorithm for.
void plain_product(Stream& stream, const Product& product);

}  // namespace tranche::kernels::cuda
