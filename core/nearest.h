#pragma once
/// What somebody may have meant who mistyped a name.

#include <string>
#include <string_view>
#include <vector>

namespace tranche {

/// Closest of `candidates` to `text` by edit distance (insertions, deletions, replacements and swaps of
/// neighbours), whatever the case of letters; empty when none is near.
std::string nearest(std::string_view text, const std::vector<std::string>& candidates);

}  // namespace tranche
