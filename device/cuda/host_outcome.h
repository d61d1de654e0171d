#pragma once
/// The outcomes of streams' host work. A CUDA event passes whether or not earlier host work failed, so the
/// dependencies of an event (or a stream) are carried beside it. Needs no CUDA.

#include <atomic>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace tranche::cuda {

/// The outcome of one stream's host work. Its tasks are numbered from 1 in the order of issue, and end in
/// that order.
class HostOutcome {
 public:
  /// Called by the issuing thread: returns the number of the next task.
  std::int64_t issue() noexcept { return issued_.fetch_add(1, std::memory_order_relaxed) + 1; }
  std::int64_t issued() const noexcept { return issued_.load(std::memory_order_relaxed); }
  void ended(std::int64_t number) noexcept { ended_.store(number, std::memory_order_release); }
  /// Keeps the first failure; tasks with lower numbers are not affected.
  void fail(std::int64_t number, std::exception_ptr error) noexcept {
    std::lock_guard lock(mutex_);
    if (error_) return;
    error_ = std::move(error);
    failed_.store(number, std::memory_order_release);
  }
  /// True when all tasks up to `number` have ended without failure.
  bool settled(std::int64_t number) const noexcept {
    return ended_.load(std::memory_order_acquire) >= number &&
           failed_.load(std::memory_order_acquire) > number;
  }
  /// The failure of task `number` or of an earlier one; null when there is none (yet).
  std::exception_ptr failure_by(std::int64_t number) const noexcept {
    if (failed_.load(std::memory_order_acquire) > number) return nullptr;
    std::lock_guard lock(mutex_);
    return error_;
  }

 private:
  std::atomic<std::int64_t> issued_{0};
  std::atomic<std::int64_t> ended_{0};
  std::atomic<std::int64_t> failed_{std::numeric_limits<std::int64_t>::max()};
  mutable std::mutex mutex_;
  std::exception_ptr error_;
};

/// The host work that an event or a stream depends on: for each stream, all tasks up to a number. Tasks that
/// ended without failure are removed, so the list stays short however long a run is.
class HostDependencies {
 public:
  void add(const std::shared_ptr<HostOutcome>& outcome, std::int64_t number) {
    if (outcome->settled(number)) return;
    for (auto& [known, last] : needed_) {
      if (known == outcome) {
        if (number > last) last = number;
        return;
      }
    }
    needed_.emplace_back(outcome, number);
  }
  void add(const HostDependencies& other) {
    for (const auto& [outcome, number] : other.needed_) add(outcome, number);
  }
  void forget_settled() {
    std::erase_if(needed_, [](const auto& need) { return need.first->settled(need.second); });
  }
  std::exception_ptr failure() const noexcept {
    for (const auto& [outcome, number] : needed_) {
      if (std::exception_ptr error = outcome->failure_by(number)) return error;
    }
    return nullptr;
  }
  bool empty() const noexcept { return needed_.empty(); }
  std::size_t size() const noexcept { return needed_.size(); }

 private:
  std::vector<std::pair<std::shared_ptr<HostOutcome>, std::int64_t>> needed_;
};

}  // namespace tranche::cuda
