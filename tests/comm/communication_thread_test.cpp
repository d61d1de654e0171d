#include "tranche/comm/communication_thread.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace tranche::comm {
namespace {

using namespace std::chrono_literals;

/// Waits for something that never comes.
class Waiting : public Pollable {
 public:
  bool poll() override {
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

}  // namespace
}  // namespace tranche::comm
