#pragma once
#include "tranche/kernels/reduction.h"

namespace tranche::kernels::cuda {

/// The most operands of one launch of ordered_sum.
inline constexpr int most_pieces = 4000;

/// Like kernels/reduction.h, with checked arguments. Each is one launch; gradient_statistics is three.
void ordered_sum(Stream& stream, std::span<const void* const> pieces, DataType piece_dtype, SumGroups groups,
                 bool accumulate, const TensorView& out);
decltype(kernels::rounded_sum) rounded_sum;
decltype(kernels::gradient_statistics) gradient_statistics;
decltype(kernels::add_digest) add_digest;

}  // namespace tranche::kernels::cuda
