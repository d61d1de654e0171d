#pragma once
/// The state that the ranks of a group of threads share. Private to comm/.

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/call_signature.h"
#include "comm/transport/communication_thread.h"
#include "comm/transport/transport.h"
#include "tranche/comm/backends.h"

namespace tranche::comm {

/// One side of a message, shared between its owner and the channel in which it waits.
struct ThreadPost {
  void* data = nullptr;
  std::int64_t bytes = 0;
  Tag tag;
  int owner = 0;
  std::string error;  // written before `matched`
  std::atomic<bool> matched{false};
};

/// Messages from one rank to another that wait for their counterpart. The later side copies while it holds
/// the mutex, so an abandoned buffer is never accessed after it was deregistered.
struct ThreadChannel {
  std::mutex mutex;
  std::list<std::shared_ptr<ThreadPost>> sends, receives;
};

/// Wakes a rank's communication thread.
struct ThreadWaker {
  std::mutex mutex;
  CommunicationThread* thread = nullptr;
  void wake() {
    const std::lock_guard lock(mutex);
    if (thread != nullptr) thread->wake();
  }
  void set(CommunicationThread* value) {
    const std::lock_guard lock(mutex);
    thread = value;
  }
};

/// The messages, registrations and failures of a group of threads.
struct ThreadHub {
  ThreadHub(int ranks, const FaultInjection& injection)
      : size(ranks),
        faults(injection),
        channels(static_cast<std::size_t>(ranks) * static_cast<std::size_t>(ranks)),
        wakers(static_cast<std::size_t>(ranks)),
        signatures(static_cast<std::size_t>(ranks)),
        farewells(static_cast<std::size_t>(ranks)),
        made(static_cast<std::size_t>(ranks)) {}

  ThreadChannel& channel(int from, int to) { return channels[static_cast<std::size_t>(from * size + to)]; }
  void post_failure(const FailureReport& report) {
    {
      const std::lock_guard lock(mutex);
      if (failure && !(failure->cause_follows && !report.cause_follows)) return;
      failure = report;
    }
    failed = true;
    for (ThreadWaker& waker : wakers) waker.wake();
  }

  /// Memory that a rank has registered.
  struct Registered {
    const unsigned char* data = nullptr;
    int readers = 0;
    bool deregistered = false;
  };
  std::int64_t register_memory(const void* data) {
    const std::lock_guard lock(registered_mutex);
    registered[++registrations].data = static_cast<const unsigned char*>(data);
    return registrations;
  }
  /// Waits for current readers; they never wait for anything themselves.
  void deregister_memory(std::int64_t number) {
    std::unique_lock lock(registered_mutex);
    const auto found = registered.find(number);
    if (found == registered.end()) return;
    found->second.deregistered = true;
    registered_changed.wait(lock, [&] { return found->second.readers == 0; });
    registered.erase(found);
  }
  const unsigned char* map_peer(std::int64_t number) {
    const std::lock_guard lock(registered_mutex);
    const auto found = registered.find(number);
    if (found == registered.end() || found->second.deregistered) return nullptr;
    ++found->second.readers;
    return found->second.data;
  }
  void unmap_peer(std::int64_t number) {
    const std::lock_guard lock(registered_mutex);
    --registered.at(number).readers;
    registered_changed.notify_all();
  }

  const int size;
  const FaultInjection faults;
  std::mutex registered_mutex;
  std::condition_variable registered_changed;
  std::int64_t registrations = 0;
  std::map<std::int64_t, Registered> registered;
  std::vector<ThreadChannel> channels;
  std::vector<ThreadWaker> wakers;
  /// Indexed by the receiving rank, or by the rank that has ended; guarded by `mutex`.
  std::vector<std::deque<CallSignature>> signatures;
  std::vector<Farewell> farewells;
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::optional<FailureReport> failure;
  std::vector<bool> made;
};

}  // namespace tranche::comm
