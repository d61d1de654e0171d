#pragma once
/// Advice about refused memory, in terms of the keys that determine its size.

#include <string_view>

#include "tranche/device/memory.h"

namespace tranche::detail {

/// "use a smaller tranche.workspace, ...", for the end of an error. The remedy for the category itself comes
/// first. Advice differs between tiers, because different keys free device memory and host memory.
std::string_view memory_advice(Tier tier, Category category);

}  // namespace tranche::detail
