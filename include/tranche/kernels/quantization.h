#pragma once
/// int8 blocks: the form in which gradients and weights are sent when the configuration asks for it. matmul.h
/// describes how calls run and how long operands stay valid.

#include <cstdint>

#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"
#include "tranche/kernels/reduction.h"

namespace tranche::kernels {

/// A block is 256 consecutive elements. It is stored as their codes, one signed byte each, followed by the
/// fp32 scale: an element is code * scale, where scale is the greatest magnitude of the block over 127 and
/// codes are rounded to nearest, ties to even. So an element is off by at most the greatest magnitude over
/// 254 (and the rounding of fp32). A block without magnitudes of 2^-119 or more is stored as zeros. A block
/// that holds an infinity or NaN has the scale NaN: such an element is decoded as NaN, the others as zero.
inline constexpr std::int64_t quantized_block = 256;
inline constexpr std::int64_t quantized_block_bytes = quantized_block + 4;
/// The bytes of so many elements, which must be a multiple of quantized_block.
constexpr std::int64_t quantized_bytes(std::int64_t elements) {
  return elements / quantized_block * quantized_block_bytes;
}

/// blocks = `values` (fp32 or 16-bit, whole blocks), quantized_bytes() of them. `blocks` is aligned to 4
/// bytes, `values` to 16.
void quantize(Stream& stream, const ConstTensorView& values, void* blocks);

/// values = the elements of `blocks`, rounded once to the dtype of `values`.
void dequantize(Stream& stream, const void* blocks, const TensorView& values);

/// The sum over ranks of reduction.h, for values in blocks: those of the first rank lie at `pieces`, followed
/// by those of the next, and so on for `ranks`. `groups` and `accumulate` are as for ordered_sum.
void quantized_sum(Stream& stream, const void* pieces, int ranks, SumGroups groups, bool accumulate,
                   const TensorView& out);

}  // namespace tranche::kernels
