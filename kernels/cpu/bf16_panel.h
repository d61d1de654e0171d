#pragma once
/// The inner loop of the bf16 GEMM: rows against panels of columns that were packed beforehand, on the
/// calling thread.

#include <cstdint>

#include "tranche/core/dtype.h"

namespace tranche::kernels::cpu {

/// Columns of a panel: four vectors of sums.
inline constexpr std::int64_t panel_columns = 64;

/// c[rows, columns] from a[rows, depth] and panels of b, one behind the other: [depth / 2][panel_columns][2]
/// each, an odd last row beside zeros. The last panel is readable for all its columns; what is behind
/// `columns` reaches no result.
struct Bf16Panels {
  std::int64_t rows = 0, columns = 0, depth = 0;
  const bfloat16* a = nullptr;
  std::int64_t stride_a = 0;
  const bfloat16* b = nullptr;
  /// Sums over the blocks of the depth so far, [rows][stride_sums], whole panels wide. Not read when this
  /// block is the first and the last. All but the last are even.
  float* sums = nullptr;
  std::int64_t stride_sums = 0;
  bool first = true, last = true;  ///< block of the depth; `c` is written with the last
  void* c = nullptr;               ///< bf16 or fp32
  std::int64_t stride_c = 0;
  bool wide = false;        ///< c is fp32
  bool accumulate = false;  ///< c += sums
  bool continues = false;   ///< the sums begin as c, which is wide
  const bfloat16* bias = nullptr;
};
void multiply(const Bf16Panels& panels);

}  // namespace tranche::kernels::cpu
