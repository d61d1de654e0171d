#include "tools/child.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>

#include "core/clock.h"
#include "tranche/core/error.h"

extern char** environ;

namespace tranche::tools {

using detail::seconds_now;

namespace {

constexpr double patience_seconds = 10;

/// Keeps the exit status of children during its lifetime. The kernel discards it if SIGCHLD is ignored, as in
/// programs that some supervisors start.
class ChildrenLeaveStatus {
 public:
  ChildrenLeaveStatus() {
    struct sigaction usual {};
    usual.sa_handler = SIG_DFL;
    ::sigaction(SIGCHLD, &usual, &before_);
  }
  ~ChildrenLeaveStatus() { ::sigaction(SIGCHLD, &before_, nullptr); }
  ChildrenLeaveStatus(const ChildrenLeaveStatus&) = delete;
  ChildrenLeaveStatus& operator=(const ChildrenLeaveStatus&) = delete;

 private:
  struct sigaction before_ {};
};

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

std::vector<std::string> environment_with(const std::vector<std::pair<std::string, std::string>>& more) {
  std::vector<std::string> variables;
  for (char** one = environ; one != nullptr && *one != nullptr; ++one) variables.emplace_back(*one);
  for (const auto& [name, value] : more) {
    if (std::getenv(name.c_str()) == nullptr) variables.push_back(fmt::format("{}={}", name, value));
  }
  return variables;
}

}  // namespace

ChildResult run_child(const ChildCommand& command, training::StopSignals& signals,
                      const std::function<void(double seconds)>& tick) {
  const auto refuse = [](const std::string& what, int error) {
    throw IoError(fmt::format("{}: {}", what, std::strerror(error)), error);
  };
  const int log = ::open(command.log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (log < 0) refuse(fmt::format("'{}' cannot be written", command.log), errno);
  // Everything is prepared before fork(), because nothing may be allocated between it and exec.
  std::vector<std::string> arguments = command.arguments;
  std::vector<std::string> variables = environment_with(command.environment);
  const std::vector<char*> argument_list = pointers_to(arguments), variable_list = pointers_to(variables);
  const pid_t parent = ::getpid();
  sigset_t none;
  sigemptyset(&none);
  const double start = seconds_now();
  const ChildrenLeaveStatus leave_status;
  const pid_t child = ::fork();
  if (child == 0) {
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) ::_exit(127);
    const int empty = ::open("/dev/null", O_RDONLY);
    ::dup2(empty, STDIN_FILENO);
    ::dup2(log, STDOUT_FILENO);
    ::dup2(log, STDERR_FILENO);
    // Until exec the child has this process's handlers, which would send a signal to themselves for ever.
    for (const int signal : {SIGINT, SIGTERM}) ::signal(signal, SIG_DFL);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    ::execve(argument_list[0], argument_list.data(), variable_list.data());
    ::_exit(127);
  }
  const int error = errno;
  ::close(log);
  if (child < 0) {
    throw Error(fmt::format("{} cannot be started: {}", command.arguments.front(), std::strerror(error)));
  }
  ::setpgid(child, child);  // both processes call it, so the order does not matter

  ChildResult result;
  double end_at = INFINITY;  // time of SIGKILL
  const auto end_it = [&] {
    ::kill(-child, SIGTERM);
    end_at = seconds_now() + patience_seconds;
  };
  int state = 0;
  for (double pause = 0.005;; pause = std::min(pause * 1.5, 0.1)) {
    const pid_t ended = ::waitpid(child, &state, WNOHANG);
    if (ended == child) break;
    if (ended < 0 && errno != EINTR) {
      throw Error(fmt::format("how {} ended cannot be found out: {}", command.arguments.front(),
                              std::strerror(errno)));
    }
    const double now = seconds_now();
    if (std::isinf(end_at) && command.timeout > 0 && now - start > command.timeout) {
      result.timed_out = true;
      end_it();
    }
    if (now > end_at) ::kill(-child, SIGKILL);
    if (tick) tick(now - start);
    std::this_thread::sleep_for(std::chrono::duration<double>(pause));
    const int signal = signals.poll();
    if (signal != 0 && result.stopped_by == 0) {
      result.stopped_by = signal;
      end_it();
    }
  }
  result.seconds = seconds_now() - start;
  result.status = WIFEXITED(state) ? WEXITSTATUS(state) : 128 + WTERMSIG(state);
  return result;
}

std::string shell_line(const std::vector<std::string>& arguments) {
  std::string line;
  for (const std::string& word : arguments) {
    if (!line.empty()) line += ' ';
    const bool plain = !word.empty() && std::all_of(word.begin(), word.end(), [](unsigned char c) {
      return std::isalnum(c) != 0 || std::strchr("_-./=:,+@%", c) != nullptr;
    });
    if (plain) {
      line += word;
      continue;
    }
    line += '\'';
    for (const char c : word) line += c == '\'' ? std::string("'\\''") : std::string(1, c);
    line += '\'';
  }
  return line;
}

std::string tail_of(const std::string& path, int most) {
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), {});
  while (!text.empty() && text.back() == '\n') text.pop_back();
  constexpr std::size_t bytes = 4000;
  if (text.size() > bytes) text.erase(0, text.size() - bytes);
  std::size_t begin = text.size();
  for (int lines = 0; begin > 0; --begin) {
    if (text[begin - 1] == '\n' && ++lines == most) break;
  }
  return text.substr(begin);
}

}  // namespace tranche::tools
