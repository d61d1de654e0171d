#include "comm/transport/communication_thread.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sys/prctl.h>
#endif

#include "tranche/device/event.h"

namespace tranche::comm {

namespace {
constexpr int yields = 40;  ///< polls before the first sleep, about 20 microseconds
constexpr auto idle_poll = std::chrono::milliseconds(100);

/// The pause grows with the waiting time, to at most a fiftieth of `waited`: the last pause adds little to
/// the wait, and a rank that waits for long leaves its cores to ranks that compute.
std::chrono::microseconds pause_after(int quiet, std::chrono::microseconds waited) {
  constexpr std::chrono::microseconds at_first{100}, longest{5000};
  if (waited < at_first * 50) return std::min(at_first, std::chrono::microseconds(10) * (quiet - yields + 1));
  return std::min(waited / 50, longest);
}
}  // namespace

struct CommunicationThread::Impl {
  /// The result of polling everything once.
  struct Found {
    bool moved = false, busy = false, needs_polling = false;
  };

  std::mutex mutex;
  std::condition_variable changed;
  bool signalled = false;
  bool stopping = false;
  int inline_callers = 0;
  std::deque<std::function<void()>> commands;
  std::once_flag started;
  std::thread thread;

  std::mutex progress_lock;  ///< held while commands run and pollables are polled; taken before `mutex`
  std::atomic<std::thread::id> progress_owner{};
  std::vector<Pollable*> pollables;  ///< guarded by progress_lock
  std::atomic<bool> busy{false};

  void start() {
    std::call_once(started, [this] { thread = std::thread([this] { loop(); }); });
  }
  Found poll(HostEvent* wanted);
  void loop();
  /// True when there is work for this thread itself, even during inline progress. The mutex is held.
  bool called() const { return signalled || stopping || !commands.empty(); }
};

/// The caller holds the progress lock.
CommunicationThread::Impl::Found CommunicationThread::Impl::poll(HostEvent* wanted) {
  Found found;
  for (Pollable* pollable : pollables) {
    if (wanted == nullptr || !wanted->query()) found.moved |= pollable->poll(wanted);
    found.busy |= pollable->busy();
    found.needs_polling |= pollable->needs_polling();
  }
  busy.store(found.busy, std::memory_order_relaxed);
  return found;
}

void CommunicationThread::Impl::loop() {
#ifdef __linux__
  prctl(PR_SET_TIMERSLACK, 5000UL);  // the default would double the short sleeps
#endif
  using Clock = std::chrono::steady_clock;
  int quiet = 0;
  Clock::time_point quiet_since{};
  for (;;) {
    {
      std::unique_lock lock(mutex);
      // It still polls now and then, so that progress does not depend on a caller that is not scheduled.
      if (inline_callers > 0)
        changed.wait_for(lock, idle_poll, [this] { return called() || inline_callers == 0; });
    }
    Found found;
    bool stop = false;
    {
      const std::lock_guard mine(progress_lock);
      progress_owner = std::this_thread::get_id();
      std::deque<std::function<void()>> work;
      {
        const std::lock_guard lock(mutex);
        work.swap(commands);
        if (signalled) quiet = 0;
        signalled = false;
        stop = stopping && work.empty();
      }
      for (auto& command : work) command();
      if (!stop) found = poll(nullptr);
      found.moved |= !work.empty();
      progress_owner = std::thread::id{};
    }
    if (stop) return;
    if (found.moved) {
      quiet = 0;
      continue;
    }
    if (++quiet < yields) {
      if (quiet == 1) quiet_since = Clock::now();
      std::this_thread::yield();
      continue;
    }
    std::unique_lock lock(mutex);
    const auto woken = [this] { return called(); };
    if (found.busy) {
      const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - quiet_since);
      changed.wait_for(lock, pause_after(quiet, waited), woken);
    } else if (found.needs_polling) {
      changed.wait_for(lock, idle_poll, woken);
    } else {
      changed.wait(lock, woken);
    }
  }
}

CommunicationThread::CommunicationThread() : impl_(std::make_unique<Impl>()) {}

CommunicationThread::~CommunicationThread() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->changed.notify_one();
  if (impl_->thread.joinable()) impl_->thread.join();
}

bool CommunicationThread::run(std::function<void()> work, double seconds) {
  struct Outcome {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::exception_ptr error;
  };
  auto outcome = std::make_shared<Outcome>();  // shared, because the caller may leave first
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->commands.emplace_back([outcome, work = std::move(work)] {
      std::exception_ptr error;
      try {
        work();
      } catch (...) {
        error = std::current_exception();
      }
      const std::lock_guard lock(outcome->mutex);
      outcome->error = error;
      outcome->done = true;
      outcome->changed.notify_all();
    });
  }
  wake();
  std::unique_lock lock(outcome->mutex);
  const auto done = [&] { return outcome->done; };
  if (seconds < 0) {
    outcome->changed.wait(lock, done);
  } else if (!outcome->changed.wait_for(lock, std::chrono::duration<double>(seconds), done)) {
    return false;
  }
  if (outcome->error) std::rethrow_exception(outcome->error);
  return true;
}

void CommunicationThread::wake() {
  impl_->start();
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->signalled = true;
  }
  impl_->changed.notify_one();
}

std::shared_ptr<void> CommunicationThread::begin_inline_progress(
    std::shared_ptr<CommunicationThread> thread) {
  Impl* impl = thread->impl_.get();
  {
    const std::lock_guard lock(impl->mutex);
    ++impl->inline_callers;
  }
  return {impl, [thread = std::move(thread)](Impl* of) {
            bool last = false;
            {
              const std::lock_guard lock(of->mutex);
              last = --of->inline_callers == 0;
            }
            // The thread continues with the remaining work.
            if (last && of->busy.load(std::memory_order_relaxed)) thread->wake();
          }};
}

bool CommunicationThread::poll_inline(HostEvent* wanted) {
  if (impl_->progress_owner.load(std::memory_order_relaxed) == std::this_thread::get_id()) return false;
  const std::unique_lock mine(impl_->progress_lock, std::try_to_lock);
  if (!mine) return false;
  impl_->progress_owner = std::this_thread::get_id();
  const bool moved = impl_->poll(wanted).moved;
  impl_->progress_owner = std::thread::id{};
  return moved;
}

bool CommunicationThread::idle() const {
  return !impl_->busy.load(std::memory_order_relaxed);
}

void CommunicationThread::add(Pollable& pollable) {
  run([this, &pollable] { impl_->pollables.push_back(&pollable); });
}

void CommunicationThread::remove(Pollable& pollable) {
  run([this, &pollable] { std::erase(impl_->pollables, &pollable); });
}

}  // namespace tranche::comm
