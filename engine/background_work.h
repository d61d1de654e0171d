#pragma once
/// Runs one function at a time on its own thread, while the engine's thread polls it. Private to engine/.

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace tranche::detail {

/// Used by one thread; only the function itself runs on another.
class BackgroundWork {
 public:
  BackgroundWork() = default;
  /// Waits for the function to end.
  ~BackgroundWork();
  BackgroundWork(const BackgroundWork&) = delete;
  BackgroundWork& operator=(const BackgroundWork&) = delete;

  /// Runs `work` on a new thread. Throws LogicError if an earlier result was not taken.
  void start(std::function<std::string()> work);
  /// True when nothing is running.
  bool at_rest() const;
  /// Waits at most so many seconds, and returns at_rest().
  bool wait_for(double seconds) const;
  /// Waits for the function and returns its result, or throws its exception. Throws LogicError when nothing
  /// was started.
  std::string take();
  /// Waits for the function and drops the result.
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
