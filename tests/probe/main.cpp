// gpu_probe [--limit SECONDS] [NAME...]: looks in seconds at each thing that everything on a GPU rests on.
// One line for each: "probe NAME: ok" or "probe NAME: FAILED reason". Each runs in a process of its own, so a
// lost context or a hang of one leaves the others. Exit status: 0 all are ok, 1 one failed, 2 usage.
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
/// The likeliest to hang come last, as every check has half of the time that is left.
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

/// In the child. Its exit status is 0 or 1, and what it writes into `reasons` is why.
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
  // A reason is short: it fits the pipe.
  if (!reason.empty() && write(reasons, reason.data(), reason.size()) < 0) _Exit(3);
  _Exit(reason.empty() ? 0 : 1);
}

/// The child's output until it closes the pipe or `end` comes; `in_time` says which.
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

/// The status of a child that is about to end; -1 for one that the driver does not let go within a second.
int status_of(pid_t child) {
  int status = -1;
  for (int tries = 0; tries < 1000; ++tries) {
    if (waitpid(child, &status, WNOHANG) == child) return status;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return -1;
}

/// Why the check failed, "" when it did not.
std::string outcome(const Check& check, double seconds) {
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0) return "no pipe could be made";
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) return "no process could be started";
  if (child == 0) run_child(check, ends[1]);
  close(ends[1]);
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(std::max(seconds, 0.0)));
  bool in_time = true;
  std::string reason = read_until(ends[0], end, in_time);
  if (!in_time) kill(child, SIGKILL);
  close(ends[0]);
  const int status = status_of(child);
  if (!in_time) {
    std::array<char, 100> text{};
    std::snprintf(text.data(), text.size(), "no answer within %.1f seconds", std::max(seconds, 0.0));
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
  std::fprintf(stderr, "gpu_probe: %s\nusage: gpu_probe [--limit SECONDS] [NAME...], NAME one of%s\n",
               what.c_str(), names.c_str());
  return 2;
}

int probe(int count, char** arguments) {
  double limit = 18;  // who waits 20 for the program reads all of its lines
  std::vector<const Check*> asked;
  for (int i = 1; i < count; ++i) {
    const std::string_view word = arguments[i];
    if (word == "--limit") {
      char* rest = nullptr;
      limit = i + 1 < count ? std::strtod(arguments[++i], &rest) : 0;
      if (rest == nullptr || *rest != '\0' || !(limit > 0)) return usage("--limit needs a number of seconds");
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
  for (const Check* check : asked) {
    const std::string reason = outcome(*check, seconds_until(end) / (check == asked.back() ? 1 : 2));
    all_ok = all_ok && reason.empty();
    std::printf("probe %s: %s%s\n", std::string(check->name).c_str(), reason.empty() ? "ok" : "FAILED ",
                reason.c_str());
    std::fflush(stdout);
  }
  return all_ok ? 0 : 1;
}

}  // namespace
}  // namespace tranche::gpu_probe

int main(int count, char** arguments) {
  return tranche::gpu_probe::probe(count, arguments);
}
