#pragma once
/// JSON as people write it, made strict, so that any JSON parser can read it.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace tranche::detail {

struct StrictJson {
  std::string text;
  /// The place of each byte of `text` in the text that was given, and one more for the end.
  std::vector<std::size_t> origin;
};

/// Rewrites the part of HJSON that configuration files use: comments (#, //, /* */), commas after the last
/// entry or none at the end of a line, keys without quotes, quotes of either kind, and values without quotes
/// that are one word (True, False and None as in Python are true, false and null; HJSON itself would take
/// the rest of the line, comma and comment included). Anything else is passed on for the parser to judge.
/// Throws InvalidArgument, with "line L, column C: " in front, for a comment without an end, text in ''',
/// several words without quotes, and blocks nested deeper than 64, which a parser would recurse into.
StrictJson strict_json(std::string_view relaxed);

/// "line 3, column 5", both from 1, columns in bytes.
std::string place_in(std::string_view text, std::size_t offset);

}  // namespace tranche::detail
