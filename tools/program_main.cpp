#include "tranche/tools/program_main.h"

#include <fcntl.h>
#include <sys/resource.h>
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

/// This is some 20 us, about as long as threads of a kernel wait for each other if each has a core. With
/// more, a thread exhausts the time that the scheduler gives it after a wake-up, and two threads become
/// slower than one; with less, small kernels pay for a wake-up each
/// (bench/results/2026-11-27-threads-beside-others.md).
constexpr const char* turns_of_a_wait = "1000";

/// Otherwise the next opened file would get the number of a closed standard descriptor, and printed text
/// would go into that file. The files opened here refuse the direction in which the standard stream is used.
void occupy_standard_descriptors() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(descriptor, F_GETFD) >= 0) continue;
    (void)::open("/dev/null", descriptor == STDIN_FILENO ? O_WRONLY : O_RDONLY);  // takes the lowest number
  }
}

/// Every file of --data stays open, and the usual limit of a shell is 1024.
void allow_many_open_files() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  (void)::setrlimit(RLIMIT_NOFILE, &limit);  // on failure a file that cannot be opened reports the limit
}

/// GNU's OpenMP threads spin for milliseconds before they sleep. If another program uses a core, spinning
/// takes that time from the thread that they wait for. The spinning time is read from the environment when
/// the program is loaded, before main(), so this starts it once more, in the same process, unless the user
/// has set it. Returns if that is impossible, or already done.
void start_with_short_waits(char** argv) {
  constexpr std::array<std::string_view, 5> computing{"train", "evaluate", "generate", "scale", "calibrate"};
  if (argv[0] == nullptr || argv[1] == nullptr) return;
  if (std::find(computing.begin(), computing.end(), argv[1]) == computing.end()) return;
  for (const char* const chosen : {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}) {
    if (std::getenv(chosen) != nullptr) return;
  }
  // If the dynamic loader started the program, or the caller of program_main() made the arguments, the
  // process has another command line.
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
  allow_many_open_files();
  // A write beyond `ulimit -f` then fails with an error text, instead of killing the process silently.
  std::signal(SIGXFSZ, SIG_IGN);
  detail::PrintableBuffer out_buffer(*std::cout.rdbuf()), errors_buffer(*std::cerr.rdbuf());
  std::ostream out(&out_buffer), errors(&errors_buffer);
  const Output output{out, errors, people_watch_output(), true};
  int status = 0;
  try {
    status = run_program({argv + 1, argv + argc}, output, models);
  } catch (...) {
    // Only errors before the launcher's world started reach this; other ranks cannot be informed of them.
    const Failure failure = describe(std::current_exception());
    errors << "tranche: " << failure.text << std::endl;
    status = failure.status;
  }
  // A run that was told by SIGPIPE to save and end has done so; text that is left over is not to end it after
  // all.
  if (out_buffer.error() == EPIPE || errors_buffer.error() == EPIPE) std::signal(SIGPIPE, SIG_IGN);
  out.flush();
  if (out_buffer.error() == 0) return status;
  // The run continued and saved its results, which matter more than its output.
  errors << "tranche: standard output cannot be written: " << std::strerror(out_buffer.error())
         << "; what was printed is not whole" << std::endl;
  return status == 0 ? static_cast<int>(ExitStatus::other) : status;
}

}  // namespace tranche::tools
