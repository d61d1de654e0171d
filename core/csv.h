#pragma once
#include <string>
#include <string_view>

namespace tranche::detail {

/// The text as a field of a line of comma-separated values: quoted, where a comma, a quote or a line's end in
/// it needs that (RFC 4180).
std::string csv_field(std::string_view text);

}  // namespace tranche::detail
