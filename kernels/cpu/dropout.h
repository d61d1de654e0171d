#pragma once
#include "kernels/cpu/dropout_mask.h"

namespace tranche::kernels::cpu {

/// As kernels::dropout with the mask's sample indices in `samples`.
void dropout(int threads, const DropoutMask& mask, std::span<const std::int64_t> samples,
             const ConstTensorView& x, const TensorView& y);

}  // namespace tranche::kernels::cpu
