#pragma once
#include <cstdint>

#include "tranche/core/dtype.h"
#include "tranche/core/shape.h"
#include "tranche/kernels/workspace.h"

namespace tranche::kernels::cpu {

/// The number of rows that are summed separately before they are added to a column's gradient: part of the
/// contract.
inline constexpr std::int64_t norm_row_block = 64;
/// The number of columns that one thread sums at a time; a multiple of every vector width. Their sums stay in
/// the first-level cache.
inline constexpr std::int64_t norm_column_chunk = 512;
/// The widest rows whose sums with the residual are kept on the caller's stack while results are streamed.
inline constexpr std::int64_t norm_streamed_columns = 8192;
/// The numbers that hold the sums of a parameter's columns: whole vectors of every width.
constexpr std::int64_t norm_sums_width(std::int64_t columns) {
  return round_up(columns, 16);
}

/// Checked operands of layer norm and RMS norm, which has neither `bias` nor `mean`.
struct NormForward {
  std::int64_t rows = 0, columns = 0;
  DataType dtype = DataType::float32;
  const void* x = nullptr;
  const void* addend = nullptr;  ///< with `sum`: x + addend is written there and normalised
  void* sum = nullptr;
  const void* weight = nullptr;
  const void* bias = nullptr;
  float epsilon = 0;
  void* y = nullptr;
  float* mean = nullptr;
  float* rstd = nullptr;
  int threads = 1;
  bool streaming = false;  ///< set by norm_forward()
};
void norm_forward(const NormForward& call);

/// RMS norm has neither `mean` nor `bias_gradient`. The workspace, which may be empty, changes no bit.
struct NormBackward {
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
  Workspace workspace;
  int threads = 1;
};
void norm_backward(const NormBackward& call);

}  // namespace tranche::kernels::cpu
