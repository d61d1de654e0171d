#pragma once
/// The closest match for a mistyped name.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace tranche::detail {

/// Least number of insertions, deletions, replacements and swaps of neighbours between the two, whatever the
/// case of letters.
std::size_t edit_distance(std::string_view a, std::string_view b);

/// Closest of `candidates` to `text` by edit distance (insertions, deletions, replacements and swaps of
/// neighbours), whatever the case of letters; empty when none is close.
std::string closest_match(std::string_view text, const std::vector<std::string>& candidates);

}  // namespace tranche::detail
