#pragma once
#include <ostream>
#include <string_view>

namespace tranche::tools {

/// True when standard output ends in a terminal. Under mpirun every rank's own output is a pseudo-terminal or
/// a pipe to the launcher, so the launcher's output is checked instead (the parent process; on hosts other
/// than the launcher's its output is no terminal).
bool people_watch_output();

/// Writes and flushes lines for people. Carriage returns at the ends of `text`, which redraw a line, are the
/// program's own and reach the terminal; those within it are made visible (core/printable.h).
void draw(std::ostream& out, std::string_view text);

}  // namespace tranche::tools
