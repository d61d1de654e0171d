#pragma once
#include "tranche/kernels/reduction.h"

namespace tranche::kernels::cpu {

/// As in kernels/reduction.h, arguments checked, on the calling thread and `threads - 1` more.
void ordered_sum(int threads, std::span<const void* const> pieces, DataType piece_dtype, int group_size,
                 bool accumulate, const TensorView& out, SumTarget target);
void rounded_sum(int threads, const ConstTensorView& source, DataType wire, bool accumulate,
                 const TensorView& out);
void gradient_statistics(int threads, const ConstTensorView& gradient, GradientStatistics* statistics);
void add_digest(int threads, const ConstTensorView& values, std::uint64_t tensor, std::int64_t first_element,
                Digest* digest);

}  // namespace tranche::kernels::cpu
