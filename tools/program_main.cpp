#include "tranche/tools/program_main.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <string_view>
#include <system_error>

#include "core/printable.h"
#include "tools/program.h"
#include "tools/terminal.h"
#include "tranche/core/error.h"

namespace tranche::tools {

namespace {

/// Some 20 us: as long as threads of a kernel mostly wait for each other where each has a core. With more a
/// thread uses up what the system would let it run at once when it is woken, and two threads become slower
/// than one; with fewer the small kernels pay for a wake-up each
/// (bench/results/2026-11-27-threads-beside-others.md).
constexpr const char* turns_of_a_wait = "1000";

/// The next file to be opened would take the number of a standard descriptor that is closed, and what is
/// printed would go into that file. Files that are opened here instead refuse what a standard stream would
/// do.
void occupy_standard_descriptors() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(descriptor, F_GETFD) >= 0) continue;
    (void)::open("/dev/null", descriptor == STDIN_FILENO ? O_WRONLY : O_RDONLY);  // takes the lowest number
  }
}

/// GNU's OpenMP has threads that wait for others turn for milliseconds before they sleep. Where another
/// program takes a core, that is time which the thread that they wait for does not get. How long they turn is
/// read from the environment when the program is loaded, before main(), so this starts it once more, in the
/// same process, unless the user has chosen. Returns where that cannot be done, or has been.
void start_with_short_waits(char** argv) {
  constexpr std::array<std::string_view, 5> computing{"train", "evaluate", "generate", "scale", "calibrate"};
  if (argv[0] == nullptr || argv[1] == nullptr) return;
  if (std::find(computing.begin(), computing.end(), argv[1]) == computing.end()) return;
  for (const char* const chosen : {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}) {
    if (std::getenv(chosen) != nullptr) return;
  }
  // Started by the dynamic loader, or with arguments that the caller of program_main() made: the command line
  // of the process is another.
  std::string given;
  for (char** argument = argv; *argument != nullptr; ++argument) given.append(*argument).push_back('\0');
  std::ifstream line("/proc/self/cmdline", std::ios::binary);
  if (given != std::string(std::istreambuf_iterator<char>(line), {})) return;
  std::error_code unknown;
  const std::string program = std::filesystem::read_symlink("/proc/self/exe", unknown);
  if (unknown || ::setenv("GOMP_SPINCOUNT", turns_of_a_wait, 0) != 0) return;
  ::execv(program.c_str(), argv);
}

}  // namespace

int program_main(int argc, char** argv, const models::ModelRegistry& models) {
  start_with_short_waits(argv);
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
