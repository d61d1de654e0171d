#pragma once
/// JSON that comes from outside of this process: all readers of files, flags and messages parse it here.

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace tranche::detail {

/// The deepest nesting of objects and lists. It is limited because code that walks, prints or frees a value
/// recurses.
inline constexpr std::size_t deepest_json = 64;

/// The findings of parse_json() in a text.
struct JsonRemarks {
  std::string problem;    ///< why the text cannot be read; empty if it can
  std::size_t byte = 0;   ///< position of the problem
  std::string duplicate;  ///< path ("a.b") of the first key given twice in an object; its last value counts
  std::string vanished;   ///< the first number, as written, that is so small that a double of it is 0
};

/// Reads one value of strict JSON in UTF-8; objects keep the order of the text. The result is_discarded(),
/// and `remarks` give the reason, when the text is not JSON, is nested deeper than `deepest_json`, or has a
/// number that no double holds. Throws only std::bad_alloc; takes time linear in the text's length.
nlohmann::ordered_json parse_json(std::string_view text, JsonRemarks* remarks = nullptr);

/// The integer value of a number that is written as an integer or, up to 2^53, in any other way (5e8);
/// nullopt for other values.
std::optional<std::int64_t> json_integer(const nlohmann::ordered_json& value);

/// A value for a message: numbers and texts as JSON, cut where they are long; lists and objects only by their
/// size.
std::string brief_json(const nlohmann::ordered_json& value);

/// True when JSON can hold a text as it is.
bool is_utf8(std::string_view text);

}  // namespace tranche::detail
