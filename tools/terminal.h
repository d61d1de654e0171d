#pragma once
#include <ostream>
#include <string_view>

namespace tranche::tools {

/// True when standard output ends in a terminal. Under mpirun every rank's own output is a pseudo-terminal or
/// a pipe to the launcher, so there it is the launcher's output that counts (the parent process; on other
/// hosts than the launcher's its output is none).
bool people_watch_output();

/// Writes and flushes lines for people. The carriage returns at the ends of `text`, with which a line is
/// drawn anew, are the program's own and reach the terminal; those within it are shown (core/printable.h).
void draw(std::ostream& out, std::string_view text);

}  // namespace tranche::tools
