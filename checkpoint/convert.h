#pragma once
/// Converts stored numbers to the requested dtype.

#include <cstdint>

#include "tranche/core/dtype.h"

namespace tranche::checkpoint {

/// Converts between fp32, bf16 and fp16: equal dtypes keep every bit, widening is exact, narrowing rounds to
/// nearest even as core/dtype.h does. Memory needs no alignment and must not overlap. Throws InvalidArgument
/// for other dtypes.
void convert(DataType from, const void* source, DataType to, void* target, std::int64_t elements);

}  // namespace tranche::checkpoint
