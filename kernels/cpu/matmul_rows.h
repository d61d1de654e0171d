#pragma once
#include <cstdint>

#include "tranche/core/dtype.h"
#include "tranche/kernels/workspace.h"

namespace tranche::kernels::cpu {

/// A checked call of kernels::matmul_rows.
struct MatmulRows {
  bool transpose_b = false;
  std::int64_t m = 0, n = 0, k = 0;
  DataType dtype = DataType::float32;    ///< of a, b and bias
  DataType c_dtype = DataType::float32;  ///< `dtype` or fp32
  const void* a = nullptr;
  const void* b = nullptr;
  const void* bias = nullptr;  ///< or null
  void* c = nullptr;
  Workspace workspace;  ///< at least minimum_workspace_bytes when dtype is 16-bit
  int threads = 1;
};

void matmul_rows(const MatmulRows& call);

}  // namespace tranche::kernels::cpu
