#include "comm/node/control_channel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/node/futex_wake_event.h"
#include "comm/window_memory.h"
#include "tests/core/error_text.h"

namespace tranche::comm {
namespace {

using std::chrono::seconds;
using testing::HasSubstr;

Tag tag_of(std::uint64_t sequence) {
  return {3, false, sequence};
}

/// Ranks 4 and 6 of a job, with their windows.
class ControlMessages : public testing::Test {
 protected:
  WindowMemory four_{Tier::host}, six_{Tier::host};
  ControlSegment &board_of_four_ = *four_.control_segment(), &board_of_six_ = *six_.control_segment();
  ControlChannel at_four_{4, 6, board_of_six_.mailbox_from(0), board_of_six_, board_of_four_.mailbox_from(1)};
  ControlChannel at_six_{6, 4, board_of_four_.mailbox_from(1), board_of_four_, board_of_six_.mailbox_from(0)};
};

TEST_F(ControlMessages, AreMatchedByTagAndInOrder) {
  const std::vector<std::int64_t> sent{10, 11, 12, 13};
  const std::vector<std::uint64_t> tags{1, 2, 1, 2};
  std::int64_t got[4] = {};
  const auto early = at_six_.receive(&got[0], 8, tag_of(2));
  EXPECT_FALSE(early->test());
  for (std::size_t i = 0; i < sent.size(); ++i) {
    EXPECT_TRUE(at_four_.send(&sent[i], 8, tag_of(tags[i]))->test()) << "copied at once";
  }
  EXPECT_TRUE(early->test());
  EXPECT_EQ(got[0], 11);
  const std::vector<std::pair<std::uint64_t, std::int64_t>> rest{{1, 10}, {2, 13}, {1, 12}};
  for (const auto& [tag, value] : rest) {
    const auto next = at_six_.receive(&got[1], 8, tag_of(tag));
    EXPECT_TRUE(next->test());
    EXPECT_EQ(got[1], value);
  }
  EXPECT_FALSE(at_six_.receive(&got[1], 8, tag_of(1))->test());
  EXPECT_FALSE(at_four_.receive(&got[1], 8, tag_of(1))->test()) << "the other direction has its own mailbox";
}

TEST_F(ControlMessages, ThatFindNoRoomWaitTheirTurn) {
  const auto slots = static_cast<std::int64_t>(Mailbox::slots);
  std::vector<std::unique_ptr<Message>> sends;
  for (std::int64_t i = 0; i < slots + 3; ++i) sends.push_back(at_four_.send(&i, 8, tag_of(9)));
  for (std::int64_t i = 0; i < slots + 3; ++i) {
    EXPECT_EQ(sends[static_cast<std::size_t>(i)]->test(), i < slots) << i;
  }
  for (std::int64_t i = 0; i < slots + 3; ++i) {
    std::int64_t got = -1;
    EXPECT_EQ(at_six_.receive(&got, 8, tag_of(9))->test(), i != slots) << i << ": nobody has sent the rest";
    if (i == slots) {
      EXPECT_TRUE(sends.back()->test()) << "one poll sends all that there is room for";
      EXPECT_TRUE(at_six_.receive(&got, 8, tag_of(9))->test());
    }
    EXPECT_EQ(got, i);
  }
}

TEST_F(ControlMessages, OfAnotherSizeAreRefused) {
  const std::int64_t value = 1;
  at_four_.send(&value, 8, tag_of(5));
  char got[16];
  const auto receive = at_six_.receive(got, 16, tag_of(5));
  EXPECT_THAT(test::message_of<CommunicationError>([&] { receive->test(); }),
              HasSubstr("rank 4 sent 8 bytes where rank 6 expects 16: the ranks' calls differ"));
  std::vector<char> large(Mailbox::max_bytes + 1);
  EXPECT_THAT(
      test::message_of<LogicError>([&] { at_four_.send(large.data(), Mailbox::max_bytes + 1, tag_of(5)); }),
      HasSubstr("a control message of 97 bytes"));
}

TEST_F(ControlMessages, CrossBetweenThreadsWhole) {
  constexpr std::int64_t channel = 20000;
  std::thread sender([this] {
    for (std::int64_t i = 0; i < channel; ++i) {
      const std::int64_t message[12] = {i, i, i, i, i, i, i, i, i, i, i, ~i};
      const auto sent = at_four_.send(message, sizeof message, tag_of(static_cast<std::uint64_t>(i)));
      while (!sent->test()) std::this_thread::yield();
    }
  });
  FutexWakeEvent wake_event(board_of_six_);
  for (std::int64_t i = 0; i < channel; ++i) {
    std::int64_t message[12] = {};
    const auto receive = at_six_.receive(message, sizeof message, tag_of(static_cast<std::uint64_t>(i)));
    for (;;) {
      const std::uint32_t seen = wake_event.count();
      if (receive->test()) break;
      wake_event.wait(seen, seconds(100));  // a lost notification would hang here
    }
    ASSERT_EQ(message[0], i);
    ASSERT_EQ(message[10], i);
    ASSERT_EQ(message[11], ~i);
  }
  sender.join();
}

TEST_F(ControlMessages, AnEarlierNotificationEndsTheWait) {
  FutexWakeEvent wake_event(board_of_six_);
  const std::uint32_t seen = wake_event.count();
  const std::int64_t value = 1;
  at_four_.send(&value, 8, tag_of(5));
  EXPECT_EQ(wake_event.count(), seen + 1);
  wake_event.wait(seen, seconds(100));
  EXPECT_EQ(board_of_six_.waiters.load(), 0U);
  wake_event.wait(wake_event.count(), std::chrono::microseconds(100));  // ends by itself
}

TEST(ControlSegment, MailboxesAreOfOneTransport) {
  WindowMemory window(Tier::host);
  EXPECT_TRUE(window.claim_mailboxes());
  EXPECT_FALSE(window.claim_mailboxes());
}

}  // namespace
}  // namespace tranche::comm
