#pragma once
/// JSON as people write it, made strict, so that any JSON parser can read it.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace tranche::detail {

struct StrictJson {
  std::string text;
  /// The position of each byte of `text` in the original text, and one more for the end.
  std::vector<std::size_t> origin;
};

/// Rewrites the part of HJSON that configuration files use: comments (#, //, /* */), a comma after the last
/// entry, a missing comma at the end of a line, keys without quotes, quotes of either kind, and values
/// without quotes that are one word (Python's True, False and None become true, false and null; HJSON itself
/// would take the rest of the line, comma and comment included). Everything else is passed to the parser
/// unchanged. Throws InvalidArgument, starting with "line L, column C: ", for a comment without an end, text
/// in ''', several words without quotes, and objects nested deeper than 64, because parsers recurse.
StrictJson strict_json(std::string_view relaxed);

/// "line 3, column 5"; both count from 1, columns in bytes.
std::string place_in(std::string_view text, std::size_t offset);

}  // namespace tranche::detail
