#pragma once
#include <string>
#include <string_view>

namespace tranche::detail {

/// "transformer.h.12 master" as "transformer.h.* master": the blocks of a model have one name.
std::string with_folded_numbers(std::string_view name);

}  // namespace tranche::detail
