#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "tranche/core/dtype.h"
#include "tranche/core/tensor_view.h"
#include "tranche/kernels/matmul.h"
#include "tranche/kernels/workspace.h"

namespace tranche::kernels::cpu {

/// A checked call of kernels::matmul.
struct MatmulCall {
  bool transpose_a = false, transpose_b = false, accumulate = false;
  std::int64_t m = 0, n = 0, k = 0;
  DataType dtype = DataType::float32;    ///< of a and b
  DataType c_dtype = DataType::float32;  ///< `dtype` or fp32
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
  Workspace workspace;  ///< at least minimum_workspace_bytes when dtype is 16-bit
  int threads = 1;
  bool continues = false;  ///< MatmulOptions::continues
};

void matmul(const MatmulCall& call);
/// A matmul that does not accumulate, then `bias` [n] added to `out`, which is c, in the operands' dtype.
/// 16-bit sums are rounded twice, even if it is done in one pass.
void matmul_bias(const MatmulCall& call, const TensorView& out, const ConstTensorView& bias);

std::string_view matmul_path(DataType dtype);
SumOrder sum_order(DataType dtype);
std::string matmul_libraries();

}  // namespace tranche::kernels::cpu
