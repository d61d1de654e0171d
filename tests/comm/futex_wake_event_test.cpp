#include "comm/node/futex_wake_event.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace tranche::comm {
namespace {

using std::chrono::seconds;

TEST(FutexWakeEvent, AnEarlierNotificationEndsTheWait) {
  ControlSegment segment;
  FutexWakeEvent wake_event(segment);
  const std::uint32_t seen = wake_event.count();
  segment.notify();
  EXPECT_EQ(wake_event.count(), seen + 1);
  wake_event.wait(seen, seconds(100));
  EXPECT_EQ(segment.waiters.load(), 0U);
  wake_event.wait(wake_event.count(), std::chrono::microseconds(100));  // ends by itself
}

TEST(FutexWakeEvent, NoNotificationIsLost) {
  constexpr int rounds = 20000;
  ControlSegment segment;
  std::atomic<int> sent{0}, taken{0};
  std::thread sender([&] {
    for (int i = 0; i < rounds; ++i) {
      while (taken.load() < i) std::this_thread::yield();
      sent.store(i + 1);
      segment.notify();
    }
  });
  FutexWakeEvent wake_event(segment);
  for (int i = 0; i < rounds; ++i) {
    for (;;) {
      const std::uint32_t seen = wake_event.count();
      if (sent.load() > i) break;
      wake_event.wait(seen, seconds(100));  // a lost notification would hang here
    }
    taken.store(i + 1);
  }
  sender.join();
}

}  // namespace
}  // namespace tranche::comm
