// gpu_probe [--limit SECONDS] [--one-by-one] [NAME...]: checks in seconds the things on which everything on a
// GPU depends. It prints one line for each: "probe NAME: ok" or "probe NAME: FAILED reason". Each check runs
// in a process of its own, so that a lost context or a hang does not affect the others. All run at the same
// time: CUDA's start may take longer than the check itself, and each has the whole limit. With --one-by-one
// they share the limit, for GPUs that admit one process at a time. Exit status: 0 all are ok, 1 one failed, 2
// usage. gpu_probe --start: prints the seconds that a process needs until CUDA is ready, and ends. gpu_probe
// --hold: does the same, and then keeps the GPU's context until its input ends, so that the driver need not
// start the GPU again for each following process.
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "check.h"

namespace tranche::gpu_probe {
namespace {

struct Check {
  std::string_view name;
  void (*run)();
};
/// In the order of their lines.
constexpr Check checks[] = {
    {"device", check_device},   {"copy", check_copy},   {"tensor_core", check_tensor_core},
    {"product", check_product}, {"graph", check_graph}, {"host_wait", check_host_wait},
#if defined(TRANCHE_PROBE_NCCL)
    {"nccl", check_nccl},
#endif
};

using Clock = std::chrono::steady_clock;
double seconds_until(Clock::time_point end) {
  return std::chrono::duration<double>(end - Clock::now()).count();
}

/// Runs in the child. The exit status is 0 or 1; the reason is written to `reasons`.
[[noreturn]] void run_child(const Check& check, int reasons) {
  std::string reason;
  try {
    check.run();
  } catch (const std::exception& error) {
    reason = error.what();
  } catch (...) {
    reason = "an exception of an unknown type";
  }
  std::fflush(nullptr);
  std::replace(reason.begin(), reason.end(), '\n', ' ');
  // A reason is short enough for the pipe.
  if (!reason.empty() && write(reasons, reason.data(), reason.size()) < 0) _Exit(3);
  _Exit(reason.empty() ? 0 : 1);
}

/// Reads the child's output until it closes the pipe or until `end`; `in_time` is true in the first case.
std::string read_until(int pipe, Clock::time_point end, bool& in_time) {
  std::string text;
  std::array<char, 4096> part{};
  for (;;) {
    pollfd ready{pipe, POLLIN, 0};
    const double left = seconds_until(end);
    in_time = left > 0 && poll(&ready, 1, static_cast<int>(1000 * left) + 1) > 0;
    if (!in_time) return text;
    const ssize_t bytes = read(pipe, part.data(), part.size());
    if (bytes <= 0) return text;
    text.append(part.data(), static_cast<std::size_t>(bytes));
  }
}

/// The status of a child that is about to end; -1 if the driver does not release it within a second.
int status_of(pid_t child) {
  int status = -1;
  for (int tries = 0; tries < 1000; ++tries) {
    if (waitpid(child, &status, WNOHANG) == child) return status;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return -1;
}

/// A running check.
struct Running {
  const Check* check = nullptr;
  pid_t child = -1;
  int reasons = -1;
  std::string problem;
};
Running start(const Check& check) {
  Running running;
  running.check = &check;
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0) {
    running.problem = "no pipe could be made";
    return running;
  }
  std::fflush(nullptr);
  running.child = fork();
  if (running.child == 0) run_child(check, ends[1]);
  if (running.child < 0) running.problem = "no process could be started";
  close(ends[1]);
  running.reasons = ends[0];
  return running;
}

/// The reason why the check failed, or "". `limit` is its whole limit.
std::string outcome(const Running& running, Clock::time_point end, double limit) {
  if (!running.problem.empty()) return running.problem;
  bool in_time = true;
  std::string reason = read_until(running.reasons, end, in_time);
  if (!in_time) kill(running.child, SIGKILL);
  close(running.reasons);
  const int status = status_of(running.child);
  if (!in_time) {
    std::array<char, 100> text{};
    std::snprintf(text.data(), text.size(), "no answer within %.1f seconds", limit);
    return text.data();
  }
  if (status == 0) return {};
  if (!reason.empty()) return reason;
  if (status != -1 && WIFSIGNALED(status)) return "ended by signal " + std::to_string(WTERMSIG(status));
  return "ended without a reason";
}

int usage(const std::string& what) {
  std::string names;
  for (const Check& check : checks) names += " " + std::string(check.name);
  std::fprintf(stderr,
               "gpu_probe: %s\nusage: gpu_probe [--limit SECONDS] [--one-by-one] [NAME...], NAME one of%s; "
               "or gpu_probe "
               "--start; or gpu_probe --hold\n",
               what.c_str(), names.c_str());
  return 2;
}

/// Prints the duration of CUDA's start; with `hold` keeps the context until the input ends.
int start_cuda(bool hold) {
  const auto begin = Clock::now();
  try {
    const auto context = open_context();
    std::printf("start %.3f s\n", -seconds_until(begin));
    std::fflush(stdout);
    std::array<char, 64> ignored{};
    while (hold && read(STDIN_FILENO, ignored.data(), ignored.size()) > 0) {
    }
  } catch (const std::exception& error) {
    std::printf("start FAILED %s\n", error.what());
    return 1;
  }
  return 0;
}

int probe(int count, char** arguments) {
  if (count == 1 &&
      (arguments[0] == std::string_view("--start") || arguments[0] == std::string_view("--hold"))) {
    return start_cuda(arguments[0] == std::string_view("--hold"));
  }
  double limit = 40;  // CUDA's start alone may take a large part of it
  bool one_by_one = false;
  std::vector<const Check*> asked;
  for (int i = 0; i < count; ++i) {
    const std::string_view word = arguments[i];
    if (word == "--limit") {
      char* rest = nullptr;
      limit = i + 1 < count ? std::strtod(arguments[++i], &rest) : 0;
      if (rest == nullptr || *rest != '\0' || !(limit > 0)) return usage("--limit needs a number of seconds");
      continue;
    }
    if (word == "--one-by-one") {
      one_by_one = true;
      continue;
    }
    const auto* found = std::find_if(std::begin(checks), std::end(checks),
                                     [&](const Check& check) { return check.name == word; });
    if (found == std::end(checks)) return usage("'" + std::string(word) + "' is no check");
    asked.push_back(found);
  }
  if (asked.empty()) {
    for (const Check& check : checks) asked.push_back(&check);
  }
  const auto end =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(limit));
  bool all_ok = true;
  const auto finish = [&](const Running& one) {
    const std::string reason = outcome(one, end, limit);
    all_ok = all_ok && reason.empty();
    std::printf("probe %s: %s%s\n", std::string(one.check->name).c_str(), reason.empty() ? "ok" : "FAILED ",
                reason.c_str());
    std::fflush(stdout);
  };
  std::vector<Running> running;
  running.reserve(asked.size());
  for (const Check* check : asked) {
    running.push_back(start(*check));
    if (one_by_one) finish(running.back());
  }
  if (!one_by_one) std::for_each(running.begin(), running.end(), finish);
  return all_ok ? 0 : 1;
}

}  // namespace
}  // namespace tranche::gpu_probe

int main(int count, char** arguments) {
  return tranche::gpu_probe::probe(count - 1, arguments + 1);
}
