#pragma once
/// JSON that comes from outside of this process: every reader of files, flags and messages parses it here.

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace tranche::detail {

/// Blocks and lists that may stand within each other: whatever walks, prints or frees a value recurses.
inline constexpr std::size_t deepest_json = 64;

/// The findings of parse_json() in a text.
struct JsonRemarks {
  std::string problem;    ///< why it cannot be read; empty: it can
  std::size_t byte = 0;   ///< of the problem
  std::string duplicate;  ///< path ("a.b") of the first key that a block gives twice; its last value counts
};

/// Reads one value of strict JSON in UTF-8; blocks keep the order of the text. The result is_discarded(), and
/// `remarks` say why, when the text is anything else, is nested deeper than `deepest_json`, or has a number
/// that no double holds. Throws nothing but std::bad_alloc; takes time linear in the text's length.
nlohmann::ordered_json parse_json(std::string_view text, JsonRemarks* remarks = nullptr);

/// The integer that a number is, written as one or, up to 2^53, in any other way (5e8); nothing of other
/// values.
std::optional<std::int64_t> json_integer(const nlohmann::ordered_json& value);

/// A value in a message: a number or a text as JSON, cut where it is long; of lists and blocks the size only.
std::string brief_json(const nlohmann::ordered_json& value);

/// True when JSON can hold a text as it is.
bool is_utf8(std::string_view text);

}  // namespace tranche::detail
