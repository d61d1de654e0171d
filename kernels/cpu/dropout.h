#pragma once
#include "kernels/cpu/dropout_mask.h"

namespace tranche::kernels::cpu {

/// The elements of a call within its samples. Each sample has `per_sample` elements, counted from its element
/// `offset`, and the call takes those from `first` on; or, if `columns` is not 0, some columns of all rows
/// (DropoutOptions::row_elements).
struct DropoutPart {
  std::int64_t first = 0, per_sample = 0, offset = 0;
  std::int64_t columns = 0, row_elements = 0, first_column = 0, column_blocks = 1;
};

/// Like kernels::dropout, with the mask's sample indices in `samples`.
void dropout(int threads, const DropoutMask& mask, std::span<const std::int64_t> samples,
             const DropoutPart& part, const ConstTensorView& x, const TensorView& y);

}  // namespace tranche::kernels::cpu
