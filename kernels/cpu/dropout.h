#pragma once
#include "kernels/cpu/dropout_mask.h"

namespace tranche::kernels::cpu {

/// The elements that a call takes of samples of which there are `per_sample` elements each, from element
/// `offset` of the sample on: those from `first` on; or, where `columns` is not 0, some columns of all rows
/// (DropoutOptions::row_elements).
struct DropoutPart {
  std::int64_t first = 0, per_sample = 0, offset = 0;
  std::int64_t columns = 0, row_elements = 0, first_column = 0, column_blocks = 1;
};

/// As kernels::dropout with the mask's sample indices in `samples`.
void dropout(int threads, const DropoutMask& mask, std::span<const std::int64_t> samples,
             const DropoutPart& part, const ConstTensorView& x, const TensorView& y);

}  // namespace tranche::kernels::cpu
