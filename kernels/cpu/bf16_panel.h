#pragma once
/// The inner loop of the bf16 GEMM on the calling thread: rows times panels of columns that were packed
/// before.

#include <cstdint>

#include "tranche/core/dtype.h"

namespace tranche::kernels::cpu {

/// The columns of a panel: four vectors of sums.
inline constexpr std::int64_t panel_columns = 64;

/// c[rows, columns] from a[rows, depth] and consecutive panels of b, each [depth / 2][panel_columns][2], with
/// an odd last row paired with zeros. The last panel must be readable for all its columns; those beyond
/// `columns` affect no result.
struct Bf16Panels {
  std::int64_t rows = 0, columns = 0, depth = 0;
  const bfloat16* a = nullptr;
  std::int64_t stride_a = 0;
  const bfloat16* b = nullptr;
  /// The sums over earlier blocks of the depth, [rows][stride_sums], whole panels wide. Not used when this
  /// block is both the first and the last. All blocks except the last have an even depth.
  float* sums = nullptr;
  std::int64_t stride_sums = 0;
  bool first = true, last = true;  ///< of the blocks of the depth; `c` is written with the last
  void* c = nullptr;               ///< bf16 or fp32
  std::int64_t stride_c = 0;
  bool wide = false;        ///< c is fp32
  bool accumulate = false;  ///< c += sums
  bool continues = false;   ///< the sums start from c, which is fp32
  const bfloat16* bias = nullptr;
};
void multiply(const Bf16Panels& panels);

}  // namespace tranche::kernels::cpu
