#pragma once
/// Wraps text into lines of bounded width.

#include <cstddef>
#include <string>
#include <string_view>

namespace tranche::tools {

inline constexpr std::size_t text_width = 100;

/// Breaks `text` between words into lines of at most text_width columns, as far as the words allow. The
/// caller has already written `at` columns of the first line; later lines are indented by `indent`. Line
/// breaks in `text` stay.
std::string wrapped(std::string_view text, std::size_t at, std::size_t indent);

/// A name, indented by two, with its text wrapped from `column` on; the text starts on the next line if the
/// name is too long.
std::string two_columns(std::string_view name, std::string_view text, std::size_t column);

}  // namespace tranche::tools
