#pragma once
#include <string>
#include <string_view>

namespace tranche::detail {

/// The text as a field of a line of comma-separated values. It is quoted if it contains a comma, a quote or a
/// line's end (RFC 4180).
std::string csv_field(std::string_view text);

}  // namespace tranche::detail
