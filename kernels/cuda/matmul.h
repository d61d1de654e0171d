#pragma once
#include <string>
#include <string_view>

#include "tranche/core/dtype.h"

namespace tranche::kernels::cuda {

/// "cuBLASLt bf16, sums in fp32", "cuBLASLt IEEE fp32 (no TF32)".
std::string_view matmul_path(DataType dtype);
/// "cuBLASLt 13.1.0, compute capability 9.0 with 132 multiprocessors": each has a part in which algorithm a
/// product gets, and so in its bits. The device is the calling thread's; "no device" where there is none.
std::string matmul_libraries();
/// The version as cublasLtGetVersion() packs it, "13.1.0".
std::string version_text(std::size_t packed);

}  // namespace tranche::kernels::cuda
