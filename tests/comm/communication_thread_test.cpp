#include "comm/transport/communication_thread.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "tranche/device/event.h"

namespace tranche::comm {
namespace {

using namespace std::chrono_literals;

/// Waits for something that never comes.
class Waiting : public Pollable {
 public:
  bool poll(HostEvent*) override {
    ++looks;
    return false;
  }
  bool busy() const override { return true; }
  bool needs_polling() const override { return false; }
  std::atomic<int> looks{0};
};

/// A rank that waits for a slow peer leaves the cores to it: pauses grow to a fiftieth of the wait, so that
/// in a second there are 40 yields, 60 short pauses, 50 ln(250 / 5) up to 250 ms and 150 behind them. A
/// constant pause of 200 microseconds would look 5000 times. A slow machine looks less often, never more.
TEST(CommunicationThread, LooksSeldomWhenItHasWaitedForLong) {
  Waiting waiting;
  CommunicationThread thread;
  thread.add(waiting);
  std::this_thread::sleep_for(1s);
  const int looks = waiting.looks;
  EXPECT_LT(looks, 900);
  EXPECT_GT(looks, 40) << "it has stopped looking";
  thread.remove(waiting);
}

/// Counts who looks.
class Counting : public Pollable {
 public:
  explicit Counting(std::thread::id own) : own_(own) {}
  bool poll(HostEvent* wanted) override {
    ++(std::this_thread::get_id() == own_ ? own_looks : other_looks);
    if (wanted != nullptr) wanted->complete();
    return false;
  }
  bool busy() const override { return true; }
  bool needs_polling() const override { return false; }
  std::atomic<int> own_looks{0}, other_looks{0};

 private:
  std::thread::id own_;
};

void wait_for_a_look(const std::atomic<int>& looks) {
  const int before = looks;
  while (looks == before) std::this_thread::sleep_for(1ms);
}

TEST(CommunicationThread, SleepsWhileAnotherStandsInForIt) {
  Counting counting(std::this_thread::get_id()), behind(std::this_thread::get_id());
  const auto thread = std::make_shared<CommunicationThread>();
  thread->add(counting);
  thread->add(behind);
  wait_for_a_look(counting.other_looks);
  {
    const auto standing_in = CommunicationThread::stand_in(thread);
    thread->run([] {});  // whatever it was at has ended
    const int before = counting.other_looks;
    const int behind_before = behind.own_looks;
    HostEvent wanted;
    while (!wanted.query()) thread->look(&wanted);
    EXPECT_EQ(counting.own_looks, 1);
    EXPECT_EQ(behind.own_looks, behind_before) << "looked on when what was wanted had passed";
    std::this_thread::sleep_for(50ms);
    // Alone it would look every 100 microseconds.
    EXPECT_LE(counting.other_looks - before, 5);
    const int unwoken = counting.other_looks;
    thread->wake();
    while (counting.other_looks == unwoken) std::this_thread::sleep_for(1ms);
  }
  // Work that was in progress when the last one left is the thread's again.
  wait_for_a_look(counting.other_looks);
  thread->remove(counting);
  thread->remove(behind);
}

}  // namespace
}  // namespace tranche::comm
