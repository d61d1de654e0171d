#pragma once
/// bf16 GEMM of tiles on the calling thread, by the CPU's dot-product instruction (AVX512_BF16): pairs of
/// bf16 are multiplied and added to fp32 sums. Every element is one sum over ascending depth, so the tiling
/// of rows and columns changes no bit.
///
/// The right operand is packed: [depth / 2][columns][2], with two neighbouring depths of a column side by
/// side. The depth is always even; an odd last row is paired with zeros.

#include <cstdint>

#include "tranche/core/dtype.h"

namespace tranche::kernels::cpu {

/// True when the CPU has the instruction, and it is faster than fp32 (matmul_onednn.h). Otherwise nothing
/// else in this file may be called.
bool bf16_tiles_are_fast();

/// c[rows, columns] = alpha a b, or c += a b (alpha is then 1). `a` has `depth` bf16 per row, rows stride_a
/// apart; `b` is packed, stride_b columns wide, and readable up to the next multiple of 16 columns.
struct Bf16Tile {
  std::int64_t rows = 0, columns = 0, depth = 0;
  const bfloat16* a = nullptr;
  std::int64_t stride_a = 0;
  const bfloat16* b = nullptr;
  std::int64_t stride_b = 0;
  float* c = nullptr;
  std::int64_t stride_c = 0;
  float alpha = 1;
  bool accumulate = false;
};
void multiply(const Bf16Tile& tile);

/// Packs `from` [depth, columns] (rows `stride` apart) without transposing it; columns up to the next
/// multiple of 16 are written as zeros.
void pack_rows(const bfloat16* from, std::int64_t stride, std::int64_t depth, std::int64_t columns,
               bfloat16* to, std::int64_t to_columns);
/// The same for fp32, rounded to bf16.
void pack_rows(const float* from, std::int64_t stride, std::int64_t depth, std::int64_t columns, bfloat16* to,
               std::int64_t to_columns);
/// Packs the transpose of `from` [columns, depth]; depth is even. Columns up to the next multiple of 16 are
/// written as zeros.
void pack_transposed(const bfloat16* from, std::int64_t stride, std::int64_t columns, std::int64_t depth,
                     bfloat16* to, std::int64_t to_columns);
/// to[columns, rows] = transpose of from[rows, columns]; rows up to the next multiple of 16 are written as
/// zeros, so to_stride must be at least that.
void transpose_rows(const bfloat16* from, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                    bfloat16* to, std::int64_t to_stride);
/// fp32 rows rounded to bf16; columns up to the next even number are written as zeros.
void narrow_rows(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                 bfloat16* to, std::int64_t to_stride);
/// to[columns, rows] in bf16 from from[rows, columns] in fp32.
void narrow_transposed(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                       bfloat16* to, std::int64_t to_stride);

}  // namespace tranche::kernels::cpu
