#pragma once
#include <string>
#include <string_view>

namespace tranche::detail {

/// Replaces each number that begins a part of a name by "*": "transformer.h.12 master" becomes
/// "transformer.h.* master", so that the blocks of a model share one name.
std::string with_folded_numbers(std::string_view name);

}  // namespace tranche::detail
