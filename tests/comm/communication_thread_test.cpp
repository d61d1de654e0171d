#include "comm/transport/communication_thread.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "core/clock.h"
#include "tranche/device/event.h"

namespace tranche::comm {
namespace {

using namespace std::chrono_literals;

/// Waits for something that never happens.
class Waiting : public Pollable {
 public:
  bool poll(HostEvent*) override {
    ++polls;
    return false;
  }
  bool busy() const override { return true; }
  bool needs_polling() const override { return false; }
  std::atomic<int> polls{0};
};

/// A rank that waits for a slow peer should leave it the cores. Pauses grow to a fiftieth of the wait, so
/// that a quarter of a second has 40 yields, 60 short pauses and then 50 ln(250 / 5). A constant pause of 200
/// microseconds would poll 1250 times. A slow machine polls less often, never more. If this thread wakes
/// late, up to 200 polls a second have been added.
TEST(CommunicationThread, PollsSeldomWhenItHasWaitedForLong) {
  Waiting waiting;
  CommunicationThread thread;
  const detail::Stopwatch watch;
  thread.add(waiting);
  std::this_thread::sleep_for(250ms);
  const int polls = waiting.polls;
  EXPECT_LT(polls, 600 + 200 * std::max(0.0, watch.seconds() - 0.25));
  while (waiting.polls <= std::max(polls, 40)) std::this_thread::sleep_for(1ms);  // it continues to poll
  thread.remove(waiting);
}

/// Counts the polls of each thread.
class Counting : public Pollable {
 public:
  explicit Counting(std::thread::id own) : own_(own) {}
  bool poll(HostEvent* wanted) override {
    ++(std::this_thread::get_id() == own_ ? own_polls : other_polls);
    if (wanted != nullptr) wanted->complete();
    return false;
  }
  bool busy() const override { return true; }
  bool needs_polling() const override { return false; }
  std::atomic<int> own_polls{0}, other_polls{0};

 private:
  std::thread::id own_;
};

void wait_for_a_poll(const std::atomic<int>& polls) {
  const int before = polls;
  while (polls == before) std::this_thread::sleep_for(1ms);
}

TEST(CommunicationThread, SleepsDuringInlineProgress) {
  Counting counting(std::this_thread::get_id()), behind(std::this_thread::get_id());
  const auto thread = std::make_shared<CommunicationThread>();
  thread->add(counting);
  thread->add(behind);
  wait_for_a_poll(counting.other_polls);
  {
    const auto inline_progress = CommunicationThread::begin_inline_progress(thread);
    thread->run([] {});  // its previous work has ended
    const detail::Stopwatch watch;
    const int before = counting.other_polls;
    const int behind_before = behind.own_polls;
    HostEvent wanted;
    while (!wanted.query()) thread->poll_inline(&wanted);
    EXPECT_EQ(counting.own_polls, 1);
    EXPECT_EQ(behind.own_polls, behind_before) << "polled on when what was wanted had passed";
    std::this_thread::sleep_for(50ms);
    // The thread would poll every 100 microseconds by itself, not ten times a second.
    const int unwoken = counting.other_polls;
    EXPECT_LE(unwoken - before, 4 + watch.seconds() / 0.1);
    thread->wake();
    while (counting.other_polls == unwoken) std::this_thread::sleep_for(1ms);
  }
  // The thread polls again for work that was in progress when the last rank left.
  wait_for_a_poll(counting.other_polls);
  thread->remove(counting);
  thread->remove(behind);
}

}  // namespace
}  // namespace tranche::comm
