#include "device/worker_team.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "core/thread.h"
#include "tranche/core/error.h"

namespace tranche::detail {
namespace {

/// Loops of one update follow each other closely, and waking a thread takes some 50 microseconds on a virtual
/// machine. Spinning longer would take cores from the compute stream.
constexpr double spin_seconds = 20e-6;

thread_local WorkerTeam* lent_team = nullptr;

/// True when `done` becomes true within the spinning time.
template <class Condition>
bool spin_until(const Condition& done) {
  const double begin = seconds_now();
  do {
    for (int look = 0; look < 32; ++look) {
      if (done()) return true;
    }
  } while (seconds_now() - begin < spin_seconds);
  return done();
}

}  // namespace

struct WorkerTeam::Impl {
  std::mutex mutex;
  std::condition_variable begun, ended;
  // The current loop, guarded by the mutex. A thread that comes late finds no part left.
  const std::function<void(int)>* part = nullptr;
  int parts = 0, next = 0, running = 0;
  std::exception_ptr failure;
  bool stopping = false;
  // Hints for spinning threads; the authoritative state is read under the mutex.
  std::atomic<std::uint64_t> loops{0};
  std::atomic<bool> busy{false};
  std::vector<std::thread> workers;

  ~Impl() {
    {
      std::lock_guard lock(mutex);
      stopping = true;
      loops.fetch_add(1, std::memory_order_relaxed);
    }
    begun.notify_all();
    for (std::thread& worker : workers) worker.join();
  }

  bool over() const { return next >= parts && running == 0; }

  /// Takes parts until none is left; the lock is held on entry and on return.
  void take_parts(std::unique_lock<std::mutex>& lock) {
    while (next < parts) {
      const int mine = next++;
      const auto* body = part;
      ++running;
      lock.unlock();
      std::exception_ptr thrown;
      try {
        (*body)(mine);
      } catch (...) {
        thrown = std::current_exception();
      }
      lock.lock();
      --running;
      if (thrown) {
        if (!failure) failure = thrown;
        next = parts;
      }
    }
    if (running == 0) busy.store(false, std::memory_order_relaxed);
  }

  void work() {
    std::uint64_t seen = 0;
    for (;;) {
      spin_until([&] { return loops.load(std::memory_order_relaxed) != seen; });
      std::unique_lock lock(mutex);
      begun.wait(lock, [&] { return stopping || loops.load(std::memory_order_relaxed) != seen; });
      if (stopping) return;
      seen = loops.load(std::memory_order_relaxed);
      take_parts(lock);
      const bool last = over();
      lock.unlock();
      if (last) ended.notify_one();
    }
  }
};

WorkerTeam::WorkerTeam(int threads) : impl_(std::make_unique<Impl>()) {
  if (threads < 1) throw InvalidArgument("a team needs at least one thread, not " + std::to_string(threads));
  impl_->workers.reserve(static_cast<std::size_t>(threads - 1));
  for (int i = 1; i < threads; ++i) {
    impl_->workers.push_back(start_quiet_thread([impl = impl_.get()] { impl->work(); }));
  }
}

WorkerTeam::~WorkerTeam() = default;

int WorkerTeam::threads() const noexcept {
  return static_cast<int>(impl_->workers.size()) + 1;
}

void WorkerTeam::run(int parts, const std::function<void(int)>& part) {
  if (parts <= 0) return;
  if (parts == 1 || impl_->workers.empty()) {
    for (int i = 0; i < parts; ++i) part(i);
    return;
  }
  Impl& team = *impl_;
  std::unique_lock lock(team.mutex);
  team.part = &part;
  team.parts = parts;
  team.next = team.running = 0;
  team.failure = nullptr;
  team.busy.store(true, std::memory_order_relaxed);
  team.loops.fetch_add(1, std::memory_order_relaxed);
  lock.unlock();
  team.begun.notify_all();
  lock.lock();
  team.take_parts(lock);
  if (!team.over()) {
    lock.unlock();
    spin_until([&] { return !team.busy.load(std::memory_order_relaxed); });
    lock.lock();
    team.ended.wait(lock, [&] { return team.over(); });
  }
  team.part = nullptr;
  const std::exception_ptr failure = std::exchange(team.failure, nullptr);
  lock.unlock();
  if (failure) std::rethrow_exception(failure);
}

WorkerTeam* WorkerTeam::of_this_thread() noexcept {
  return lent_team;
}

WorkerTeam::Loan::Loan(WorkerTeam& team) noexcept : before_(std::exchange(lent_team, &team)) {}
WorkerTeam::Loan::~Loan() {
  lent_team = before_;
}

}  // namespace tranche::detail
