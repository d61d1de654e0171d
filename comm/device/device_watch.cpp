#include "comm/device/device_watch.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <list>
#include <thread>

#include <fmt/format.h>

#include "comm/device/device_exchange.h"
#include "comm/transport/operation.h"
#include "core/clock.h"
#include "tranche/core/error.h"

namespace tranche::comm {

struct DeviceWatch::Impl {
  struct Entry {
    WatchedOperation operation;
    double since = -1;  ///< when `started` was first seen passed
    bool asked = false;
  };

  std::shared_ptr<DeviceFailure> failure;
  const double timeout, patience;
  const std::function<void()> check, abort;
  std::mutex mutex;
  std::condition_variable changed;
  std::list<Entry> entries;
  bool stopping = false;
  bool aborted = false;  // accessed by the thread only
  std::thread thread;

  Impl(std::shared_ptr<DeviceFailure> the_failure, double seconds, std::function<void()> check_function,
       std::function<void()> abort_function)
      : failure(std::move(the_failure)),
        timeout(seconds),
        patience(patience_of(seconds)),
        check(std::move(check_function)),
        abort(std::move(abort_function)) {}

  /// True when the operation is done and can be removed; throws when it failed or is overdue.
  bool finished(Entry& entry, double now) {
    const auto& done = entry.operation.done;
    if (done->inner().query()) {
      done->wait_inner(0);
      return true;
    }
    if (entry.since < 0) {
      if (done->started().query()) entry.since = now;
      return false;
    }
    if (!entry.asked && now - entry.since > patience) {
      entry.asked = true;
      if (entry.operation.ask) entry.operation.ask();
    }
    if (timeout <= 0) return false;
    if (now - entry.since < timeout) return false;
    PendingPeers pending;
    pending.sending = entry.operation.sending;
    for (const auto& [rank, event] : done->peers()) {
      if (!event.query()) pending.ranks.push_back(rank);
    }
    if (entry.operation.awaited >= 0) pending.ranks.push_back(entry.operation.awaited);
    std::sort(pending.ranks.begin(), pending.ranks.end());
    pending.ranks.erase(std::unique(pending.ranks.begin(), pending.ranks.end()), pending.ranks.end());
    throw CommunicationError(timeout_message(done->what(), pending, timeout, failure->rank_names()));
  }

  void visit() {
    std::string what;
    try {
      check();
      const double now = detail::seconds_now();
      const std::lock_guard lock(mutex);
      for (auto it = entries.begin(); it != entries.end();) {
        what = it->operation.done->what();
        it = finished(*it, now) ? entries.erase(it) : std::next(it);
      }
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      try {
        check();  // a peer's report is more informative than its device's failure
        failure->fail(what, error);
      } catch (...) {
        failure->fail({}, std::current_exception());
      }
    }
    if (failure->failed() && !aborted) {
      aborted = true;
      abort();
    }
  }

  void run() {
    const double pause = timeout > 0 ? std::clamp(timeout / 20, 0.001, 0.01) : 0.01;
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return stopping || !entries.empty(); });
      if (stopping) break;
      lock.unlock();
      visit();
      lock.lock();
      if (aborted) break;
      changed.wait_for(lock, std::chrono::duration<double>(pause), [&] { return stopping; });
    }
    lock.unlock();
    if (failure->failed() && !aborted) abort();
  }
};

DeviceWatch::DeviceWatch(std::shared_ptr<DeviceFailure> failure, double timeout, std::function<void()> check,
                         std::function<void()> abort)
    : impl_(std::make_unique<Impl>(std::move(failure), timeout, std::move(check), std::move(abort))) {
  impl_->thread = std::thread([impl = impl_.get()] { impl->run(); });
}

DeviceWatch::~DeviceWatch() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->changed.notify_one();
  impl_->thread.join();
}

void DeviceWatch::add(WatchedOperation operation) {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->entries.push_back({std::move(operation)});
  }
  impl_->changed.notify_one();
}

}  // namespace tranche::comm
