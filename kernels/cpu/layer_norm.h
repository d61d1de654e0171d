#pragma once
#include <cstdint>

#include "tranche/core/dtype.h"

namespace tranche::kernels::cpu {

/// Rows that are summed on their own before they are added to a column's gradient: part of the contract.
inline constexpr std::int64_t layer_norm_row_block = 64;
/// Columns that one thread sums at a time; a multiple of every vector width. Their sums stay in the first
/// cache.
inline constexpr std::int64_t layer_norm_column_chunk = 512;

/// Checked operands of kernels::layer_norm_forward.
struct LayerNormForward {
  std::int64_t rows = 0, columns = 0;
  DataType dtype = DataType::float32;
  const void* x = nullptr;
  const void* weight = nullptr;
  const void* bias = nullptr;
  float epsilon = 0;
  void* y = nullptr;
  float* mean = nullptr;
  float* rstd = nullptr;
  int threads = 1;
};
void layer_norm_forward(const LayerNormForward& call);

/// Checked operands of kernels::layer_norm_backward.
struct LayerNormBackward {
  std::int64_t rows = 0, columns = 0;
  DataType dtype = DataType::float32;
  const void* dy = nullptr;
  const void* x = nullptr;
  const void* weight = nullptr;
  const float* mean = nullptr;
  const float* rstd = nullptr;
  bool accumulate_dx = false;
  void* dx = nullptr;
  float* weight_gradient = nullptr;
  float* bias_gradient = nullptr;
  int threads = 1;
};
void layer_norm_backward(const LayerNormBackward& call);

}  // namespace tranche::kernels::cpu
