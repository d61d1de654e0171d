#pragma once
/// Internal: one piece of work at a time on a thread of its own, watched by the engine's thread.

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace tranche::detail {

/// Used by one thread; only the work itself runs on another.
class BackgroundWork {
 public:
  BackgroundWork() = default;
  /// Waits for the work.
  ~BackgroundWork();
  BackgroundWork(const BackgroundWork&) = delete;
  BackgroundWork& operator=(const BackgroundWork&) = delete;

  /// Runs `work` on a new thread. LogicError while an earlier one's result was not taken.
  void start(std::function<std::string()> work);
  /// True when nothing is running.
  bool at_rest() const;
  /// Waits at most so many seconds; at_rest().
  bool wait_for(double seconds) const;
  /// The result of the work; throws what it threw. Waits for it. LogicError when nothing was started.
  std::string take();
  /// Waits, and drops the result.
  void drop() noexcept;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable ended_;
  bool running_ = false;  ///< guarded by mutex_, as are result_ and error_ while it is set
  std::string result_;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace tranche::detail
