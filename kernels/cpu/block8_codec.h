#pragma once
/// Decodes and encodes states in blocks of 8 bits (core/block8.h) by whole vectors. The bits are those of
/// core's encode_blocks8() and decode_blocks8(), which define the format plainly. AVX-512 and AVX2 have
/// separate code with few instructions, because these bound an update on them, and memory does not. For other
/// instruction sets the compiler vectorises; comparisons written by hand were slower there.

#include <cstddef>
#include <cstdint>

#include "tranche/core/dtype.h"

namespace tranche::kernels::cpu {

/// Elements [0, count) of blocks that begin at `blocks`. `ahead`: bytes of prefetch, 0 for none.
void decode_blocks8(DataType dtype, const std::byte* blocks, std::int64_t count, std::int64_t ahead,
                    float* to);
/// The inverse; missing elements of the last block get the code of 0.
void encode_blocks8(DataType dtype, const float* from, std::int64_t count, std::byte* blocks);

}  // namespace tranche::kernels::cpu
