#include "tranche/comm/communication_thread.h"

#include <algorithm>
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

namespace tranche::comm {

namespace {
constexpr int yields = 40;  ///< looks before the first sleep, about 20 microseconds
constexpr auto idle_look = std::chrono::milliseconds(100);

/// Longer the longer nothing came: at most a fiftieth of `waited`, so that the last pause adds little to the
/// wait, while a rank that waits for long leaves its cores to those that compute.
std::chrono::microseconds pause_after(int quiet, std::chrono::microseconds waited) {
  constexpr std::chrono::microseconds at_first{100}, longest{5000};
  if (waited < at_first * 50) return std::min(at_first, std::chrono::microseconds(10) * (quiet - yields + 1));
  return std::min(waited / 50, longest);
}
}  // namespace

struct CommunicationThread::Impl {
  std::mutex mutex;
  std::condition_variable changed;
  bool signalled = false;
  bool stopping = false;
  std::deque<std::function<void()>> commands;
  std::vector<Pollable*> pollables;  // of the thread alone
  std::once_flag started;
  std::thread thread;

  void start() {
    std::call_once(started, [this] { thread = std::thread([this] { loop(); }); });
  }
  void loop();
};

void CommunicationThread::Impl::loop() {
#ifdef __linux__
  prctl(PR_SET_TIMERSLACK, 5000UL);  // the default would double the short sleeps
#endif
  using Clock = std::chrono::steady_clock;
  int quiet = 0;
  Clock::time_point quiet_since{};
  for (;;) {
    std::deque<std::function<void()>> work;
    bool stop = false;
    {
      const std::lock_guard lock(mutex);
      work.swap(commands);
      if (signalled) quiet = 0;
      signalled = false;
      stop = stopping;
    }
    for (auto& command : work) command();
    if (stop && work.empty()) return;
    bool moved = !work.empty(), busy = false, look = false;
    for (Pollable* pollable : pollables) {
      moved |= pollable->poll();
      busy |= pollable->busy();
      look |= pollable->needs_polling();
    }
    if (moved) {
      quiet = 0;
      continue;
    }
    if (++quiet < yields) {
      if (quiet == 1) quiet_since = Clock::now();
      std::this_thread::yield();
      continue;
    }
    std::unique_lock lock(mutex);
    const auto woken = [this] { return signalled || stopping; };
    if (busy) {
      const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - quiet_since);
      changed.wait_for(lock, pause_after(quiet, waited), woken);
    } else if (look) {
      changed.wait_for(lock, idle_look, woken);
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
  auto outcome = std::make_shared<Outcome>();  // shared: the caller may leave first
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->commands.push_back([outcome, work = std::move(work)] {
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

void CommunicationThread::add(Pollable& pollable) {
  run([this, &pollable] { impl_->pollables.push_back(&pollable); });
}

void CommunicationThread::remove(Pollable& pollable) {
  run([this, &pollable] { std::erase(impl_->pollables, &pollable); });
}

}  // namespace tranche::comm
