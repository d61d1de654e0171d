#pragma once
#include <cstddef>
#include <cstdint>

#include "tranche/kernels/reduction.h"

namespace tranche::kernels::cpu {

/// How far ahead a sum of so many pieces asks for each of them. As measured on a Zen 4 whose memory copies
/// 90 GB/s: with 1024 bytes four pieces take a quarter longer than with none; two take least with 192.
/// Intel's processors, where 1024 was found to be best for optimizers, keep it, and so does a single piece.
inline std::int64_t sum_prefetch_bytes(std::size_t pieces) {
#if defined(__x86_64__)
  if (__builtin_cpu_is("intel")) return 1024;
#endif
  return pieces == 1 ? 1024 : pieces == 2 ? 192 : 0;
}

/// As in kernels/reduction.h, arguments checked, on the calling thread and `threads - 1` more.
void ordered_sum(int threads, std::span<const void* const> pieces, DataType piece_dtype, int group_size,
                 bool accumulate, const TensorView& out, SumTarget target);
void rounded_sum(int threads, const ConstTensorView& source, DataType wire, bool accumulate,
                 const TensorView& out);
void gradient_statistics(int threads, const ConstTensorView& gradient, GradientStatistics* statistics);
void add_digest(int threads, const ConstTensorView& values, std::uint64_t tensor, std::int64_t first_element,
                Digest* digest);

}  // namespace tranche::kernels::cpu
