#pragma once
#include <ostream>
#include <string_view>

namespace tranche::tools {

/// True if standard output ends in a terminal. Under mpirun a rank's output is a pseudo-terminal or a pipe to
/// the launcher, so the output of the launcher (the parent process) is checked instead. On other hosts than
/// the launcher's the parent's output is no terminal.
bool people_watch_output();

/// Writes and flushes lines for people. Carriage returns at the ends of `text` redraw a line and reach the
/// terminal unchanged; those within the text are made visible (core/printable.h).
void draw(std::ostream& out, std::string_view text);

}  // namespace tranche::tools
