#pragma once
/// States in blocks of 8 bits (core/block8.h), decoded and encoded by whole vectors. The bits are those of
/// core's encode_blocks8() and decode_blocks8(), which state the format plainly. AVX-512 and AVX2 have code
/// of their own: as few instructions as we could find, since they and not the memory bound an update on them.
/// On other instruction sets the compiler makes the vectors; comparisons written by hand were slower there.

#include <cstddef>
#include <cstdint>

#include "tranche/core/dtype.h"

namespace tranche::kernels::cpu {

/// Elements [0, count) of blocks that begin at `blocks`. `ahead`: bytes of prefetch, 0 for none.
void decode_blocks8(DataType dtype, const std::byte* blocks, std::int64_t count, std::int64_t ahead,
                    float* to);
/// The other way; what is missing in the last block has the code of 0.
void encode_blocks8(DataType dtype, const float* from, std::int64_t count, std::byte* blocks);

}  // namespace tranche::kernels::cpu
