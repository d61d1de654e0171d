#pragma once
#include "tranche/kernels/reduction.h"

namespace tranche::kernels::cuda {

/// Pieces that one launch of ordered_sum takes.
inline constexpr int most_pieces = 4000;

/// As in kernels/reduction.h, arguments checked. ordered_sum, rounded_sum and add_digest are one
/// launch, gradient_statistics two for each 2^20 blocks of 4096 elements (fewer with a workspace below 8
/// MiB).
void ordered_sum(Stream& stream, std::span<const void* const> pieces, DataType piece_dtype, int group_size,
                 bool accumulate, const TensorView& out);
void rounded_sum(Stream& stream, const ConstTensorView& source, DataType wire, bool accumulate,
                 const TensorView& out);
void gradient_statistics(Stream& stream, const ConstTensorView& gradient, GradientStatistics* statistics,
                         const Workspace& workspace);
void add_digest(Stream& stream, const ConstTensorView& values, std::uint64_t tensor,
                std::int64_t first_element, Digest* digest);

}  // namespace tranche::kernels::cuda
