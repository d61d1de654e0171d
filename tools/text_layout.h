#pragma once
/// Text in lines of bounded width.

#include <cstddef>
#include <string>
#include <string_view>

namespace tranche::tools {

inline constexpr std::size_t text_width = 100;

/// `text` broken between words into lines of at most text_width columns, where words allow. The first line
/// begins at column `at`, which the caller has written up to; those after it are indented by `indent`. Line
/// breaks of `text` stay.
std::string wrapped(std::string_view text, std::size_t at, std::size_t indent);

/// A name, indented by two, and its text from `column` on, wrapped there; below a name that is too long.
std::string two_columns(std::string_view name, std::string_view text, std::size_t column);

}  // namespace tranche::tools
