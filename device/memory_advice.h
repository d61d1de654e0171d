#pragma once
/// Says what to do about memory that was refused, by the keys that decide how large it is.

#include <string_view>

#include "tranche/device/memory.h"

namespace tranche::detail {

/// "use a smaller tranche.workspace, ...", for the end of an error; the remedy that is closest to the
/// category comes first. What frees device memory is not what frees host memory.
std::string_view memory_advice(Tier tier, Category category);

}  // namespace tranche::detail
