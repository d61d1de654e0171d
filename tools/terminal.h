#pragma once
#include <string>
#include <string_view>

namespace tranche::tools {

/// Whether standard output ends in a terminal. Under mpirun every rank's own output is a pseudo-terminal or a
/// pipe to the launcher, so there it is the launcher's output that counts (the parent process; on other hosts
/// than the launcher's its output is none).
bool people_watch_output();

/// Text that may hold any bytes, for a terminal: what is not UTF-8 becomes U+FFFD, control characters but
/// newline and tab become '?'.
std::string printable(std::string_view text);

}  // namespace tranche::tools
