#include "tranche/tools/program_main.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <iostream>

#include "core/printable.h"
#include "tools/program.h"
#include "tools/terminal.h"
#include "tranche/core/error.h"

namespace tranche::tools {

namespace {

/// The next file to be opened would take the number of a standard descriptor that is closed, and what is
/// printed would go into that file. Files that are opened here instead refuse what a standard stream would
/// do.
void occupy_standard_descriptors() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(descriptor, F_GETFD) >= 0) continue;
    (void)::open("/dev/null", descriptor == STDIN_FILENO ? O_WRONLY : O_RDONLY);  // takes the lowest number
  }
}

}  // namespace

int program_main(int argc, char** argv, const models::ModelRegistry& models) {
  occupy_standard_descriptors();
  // A file that grows beyond `ulimit -f` is an error of the write, with a text, and no end without one.
  std::signal(SIGXFSZ, SIG_IGN);
  detail::PrintableBuffer out_buffer(*std::cout.rdbuf()), errors_buffer(*std::cerr.rdbuf());
  std::ostream out(&out_buffer), errors(&errors_buffer);
  const Output output{out, errors, people_watch_output()};
  int status = 0;
  try {
    status = run_program({argv + 1, argv + argc}, output, models);
  } catch (...) {
    // Only what no rank could be told of comes here: the launcher's world did not start.
    const Failure failure = describe(std::current_exception());
    errors << "tranche: " << failure.text << std::endl;
    status = failure.status;
  }
  out.flush();
  if (out_buffer.error() == 0) return status;
  // A run has trained on and saved: what it computed is worth more than what it said.
  errors << "tranche: standard output cannot be written: " << std::strerror(out_buffer.error())
         << "; what was printed is not whole" << std::endl;
  return status == 0 ? static_cast<int>(ExitStatus::other) : status;
}

}  // namespace tranche::tools
