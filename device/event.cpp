#include "tranche/device/event.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "core/clock.h"

namespace tranche {
namespace {

std::chrono::steady_clock::time_point deadline_after(double seconds) {
  // A time far beyond any run, which keeps the conversion to integer ticks from overflowing.
  constexpr double longest = 1e8;
  return std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                std::chrono::duration<double>(std::min(seconds, longest)));
}

}  // namespace

struct HostEvent::Impl {
  std::mutex mutex;
  std::condition_variable passed;
  std::atomic<bool> done{false};  // written under the mutex; read without it by query()
  std::exception_ptr error;       // written before done
  double when = 0;                // likewise
  std::function<bool()> progress;
  std::function<std::shared_ptr<void>()> attend;
  std::shared_ptr<WakeEvent> wake_event;

  bool finish(std::exception_ptr failure) {
    {
      std::lock_guard lock(mutex);
      if (done.load(std::memory_order_relaxed)) return false;
      error = std::move(failure);
      when = detail::seconds_now();
      done.store(true, std::memory_order_release);
    }
    passed.notify_all();
    return true;
  }

  // Sleeps until the event is passed or until `until`; returns whether it was passed.
  bool sleep_until(std::chrono::steady_clock::time_point until) {
    std::unique_lock lock(mutex);
    return passed.wait_until(lock, until, [&] { return done.load(std::memory_order_relaxed); });
  }

  bool wait_plain(double seconds) {
    if (seconds >= 0) return sleep_until(deadline_after(seconds));
    std::unique_lock lock(mutex);
    passed.wait(lock, [&] { return done.load(std::memory_order_relaxed); });
    return true;
  }

  // The waiter makes progress itself: it polls a few times, then pauses between polls for up to 100 us so
  // that other ranks on the same cores progress too. After a long wait a pause lasts a fiftieth of the time
  // waited. It pauses on the wake event, or on the condition variable, so a completion by another thread ends
  // the pause at once.
  bool wait_with_progress(double seconds) {
    using Clock = std::chrono::steady_clock;
    constexpr int eager_tries = 32;
    constexpr std::chrono::microseconds longest_pause{100}, longest_of_all{5000};
    const auto limit = deadline_after(seconds < 0 ? 1e8 : seconds);
    const std::shared_ptr<void> attending = attend ? attend() : nullptr;
    std::chrono::microseconds pause{1};
    Clock::time_point quiet_since{};
    for (int tries = 0;; ++tries) {
      // The count is read before the poll, so that a notification during the poll ends the pause at once.
      const std::uint32_t seen = wake_event ? wake_event->count() : 0;
      const bool moved = progress();
      if (done.load(std::memory_order_acquire)) return true;
      const auto now = Clock::now();
      if (seconds >= 0 && now >= limit) return false;
      if (moved || tries == 0) {
        tries = 0;
        pause = std::chrono::microseconds{1};
        quiet_since = now;
        if (moved) continue;
      }
      if (tries < eager_tries) {
        std::this_thread::yield();
        continue;
      }
      const auto until = std::min(limit, now + pause);
      if (wake_event) {
        wake_event->wait(seen, std::chrono::ceil<std::chrono::microseconds>(until - now));
      } else if (sleep_until(until)) {
        return true;
      }
      const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(now - quiet_since);
      pause = std::clamp(waited / 50, std::min(pause * 2, longest_pause), longest_of_all);
    }
  }
};

HostEvent::HostEvent() : impl_(std::make_unique<Impl>()) {}
HostEvent::~HostEvent() = default;

bool HostEvent::query() {
  return impl_->done.load(std::memory_order_acquire);
}

bool HostEvent::wait(double seconds) {
  if (!query()) {
    const bool passed = impl_->progress ? impl_->wait_with_progress(seconds) : impl_->wait_plain(seconds);
    if (!passed) return false;
  }
  if (impl_->error) std::rethrow_exception(impl_->error);
  return true;
}

double HostEvent::passed_at() {
  return query() ? impl_->when : std::numeric_limits<double>::quiet_NaN();
}

void HostEvent::complete() {
  impl_->finish(nullptr);
}

void HostEvent::fail(std::exception_ptr error) {
  impl_->finish(std::move(error));
}

void HostEvent::set_progress(std::function<bool()> progress, std::function<std::shared_ptr<void>()> attend,
                             std::shared_ptr<WakeEvent> wake_event) {
  impl_->progress = std::move(progress);
  impl_->attend = std::move(attend);
  impl_->wake_event = std::move(wake_event);
}

}  // namespace tranche
