#include "tests/device/gpu_cases.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "device/cuda_probe.h"

namespace tranche::test {
namespace {

using Clock = std::chrono::steady_clock;

/// Bypasses stdio, whose lock a hanging thread may hold.
[[noreturn]] void leave(const std::string& text, int status) {
  std::string rest = text;
  while (!rest.empty()) {
    const auto written = write(STDOUT_FILENO, rest.data(), rest.size());
    if (written <= 0) break;
    rest.erase(0, static_cast<std::size_t>(written));
  }
  // Exits without destructors, which would use a lost context or wait for the hanging work.
  _Exit(status);
}

/// The line with which GoogleTest reports a failed case, from which readers of the output know what has run.
std::string failed_line(const std::string& name, double seconds) {
  return "[  FAILED  ] " + name + " (" + std::to_string(static_cast<long>(1000 * seconds)) + " ms)\n";
}

double seconds_of_a_case() {
  const char* text = std::getenv("TRANCHE_TEST_CASE_SECONDS");
  if (text == nullptr || *text == '\0') return 0;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (*end != '\0' || !(seconds > 0 && seconds < 1e6)) {
    leave("TRANCHE_TEST_CASE_SECONDS is '" + std::string(text) + "': give the seconds that a case may take\n",
          2);
  }
  return seconds;
}

/// A thread that ends the program if a case takes too long; does nothing without a limit.
class Watchdog {
 public:
  explicit Watchdog(double seconds) : limit_(seconds) {
    if (limit_ > 0) thread_ = std::thread([this] { watch(); });
  }
  ~Watchdog() {
    {
      std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// Starts watching a case; "" stops it.
  void watch_case(const std::string& name) {
    {
      std::lock_guard lock(mutex_);
      name_ = name;
      begin_ = Clock::now();
    }
    changed_.notify_all();
  }

 private:
  void watch() {
    std::unique_lock lock(mutex_);
    while (!ended_) {
      if (name_.empty()) {
        changed_.wait(lock);
        continue;
      }
      const auto deadline =
          begin_ + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(limit_));
      if (Clock::now() < deadline) {
        changed_.wait_until(lock, deadline);
        continue;
      }
      leave("\nA case hangs: " + name_ + " has taken more than " + std::to_string(limit_) +
                " seconds (TRANCHE_TEST_CASE_SECONDS); this program ends here\n" + failed_line(name_, limit_),
            status_after_hang);
    }
  }

  const double limit_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string name_;
  Clock::time_point begin_;
  bool ended_ = false;
  std::thread thread_;
};

class CaseGuard : public ::testing::EmptyTestEventListener {
 public:
  void OnTestProgramStart(const ::testing::UnitTest&) override {
    watchdog_ = std::make_unique<Watchdog>(seconds_of_a_case());
  }
  void OnTestStart(const ::testing::TestInfo& test) override {
    begin_ = Clock::now();
    watchdog_->watch_case(name_of(test));
  }
  // The fixture has been destroyed. The watchdog still watches, because the query waits for all work that the
  // case has issued.
  void OnTestEnd(const ::testing::TestInfo& test) override {
    // This is not queried before the first case, which may set variables that are read at the first use of
    // GPUs.
    static const bool has_gpu = !detail::probe_cuda().devices.empty();
    if (const std::string error = has_gpu ? lasting_cuda_error() : std::string(); !error.empty()) {
      std::fflush(nullptr);
      const std::chrono::duration<double> taken = Clock::now() - begin_;
      leave("\nA case left a CUDA error that stays: " + name_of(test) + ": " + error +
                "; every later case would fail, so this program ends here\n" +
                failed_line(name_of(test), taken.count()),
            status_after_fault);
    }
    watchdog_->watch_case({});
  }
  void OnTestProgramEnd(const ::testing::UnitTest&) override { watchdog_.reset(); }

 private:
  static std::string name_of(const ::testing::TestInfo& test) {
    return std::string(test.test_suite_name()) + "." + test.name();
  }
  Clock::time_point begin_;
  std::unique_ptr<Watchdog> watchdog_;
};

const bool listening = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new CaseGuard);
  return true;
}();

}  // namespace
}  // namespace tranche::test
