#include "engine/background_work.h"

#include <chrono>
#include <utility>

#include "core/thread.h"
#include "tranche/core/error.h"

namespace tranche::detail {

BackgroundWork::~BackgroundWork() {
  drop();
}

void BackgroundWork::start(std::function<std::string()> work) {
  if (thread_.joinable())
    throw LogicError("background work is started before the last one's result was taken");
  running_ = true;
  result_.clear();
  error_ = nullptr;
  try {
    thread_ = start_quiet_thread([this, work = std::move(work)] {
      std::string result;
      std::exception_ptr error;
      try {
        result = work();
      } catch (...) {
        error = std::current_exception();
      }
      const std::lock_guard lock(mutex_);
      result_ = std::move(result);
      error_ = std::move(error);
      running_ = false;
      ended_.notify_all();
    });
  } catch (...) {
    running_ = false;
    throw;
  }
}

bool BackgroundWork::at_rest() const {
  const std::lock_guard lock(mutex_);
  return !running_;
}

bool BackgroundWork::wait_for(double seconds) const {
  std::unique_lock lock(mutex_);
  return ended_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return !running_; });
}

std::string BackgroundWork::take() {
  if (!thread_.joinable()) throw LogicError("there is no result of background work to take");
  thread_.join();
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  return std::move(result_);
}

void BackgroundWork::drop() noexcept {
  if (thread_.joinable()) thread_.join();
}

}  // namespace tranche::detail
