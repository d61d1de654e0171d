#include "comm/transport/progress_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace tranche::comm {
namespace {

using testing::HasSubstr;

/// Rank 2 of 4 whose peers say what the test wants them to say.
struct Peers {
  std::optional<FailureReport> said;
  std::vector<FailureReport> heard;  ///< by them
};
class ScriptedTransport : public Transport {
 public:
  explicit ScriptedTransport(Peers& peers) : peers_(peers) {}
  int rank() const override { return 2; }
  int size() const override { return 4; }
  std::string_view backend() const override { return "scripted"; }
  int node_of(int) const override { return 0; }
  std::unique_ptr<Message> send(const void*, std::int64_t, int, const Tag&) override { return nullptr; }
  std::unique_ptr<Message> receive(void*, std::int64_t, int, const Tag&) override { return nullptr; }
  std::optional<FailureReport> poll_failure() override { return peers_.said; }
  bool post_failure(const FailureReport& report) override {
    peers_.heard.push_back(report);
    return true;
  }
  bool needs_polling() const override { return false; }
  void abort_job(int) noexcept override {}
  void close(bool, double) noexcept override {}

 private:
  Peers& peers_;
};

std::shared_ptr<ProgressEngine> engine_of(Peers& peers) {
  // No thread: progress is made where the test calls.
  return std::make_shared<ProgressEngine>(std::make_unique<ScriptedTransport>(peers), nullptr,
                                          CommunicatorOptions{}, FaultInjection{}, nullptr);
}

std::string health_of(ProgressEngine& engine) {
  try {
    engine.require_healthy("barrier in end");
  } catch (const CommunicationError& error) {
    return error.what();
  }
  return "well";
}

ExitStatus status_of(ProgressEngine& engine) {
  try {
    engine.require_healthy("barrier in end");
  } catch (const Error& error) {
    return error.exit_status();
  }
  return ExitStatus::success;
}

TEST(ProgressEngine, OwnFailuresGoToThePeersAsTheyAre) {
  Peers peers;
  const auto engine = engine_of(peers);
  EXPECT_EQ(health_of(*engine), "well");
  engine->post_failure("disk full", ExitStatus::checkpoint, 1);
  ASSERT_EQ(peers.heard.size(), 1U);
  EXPECT_EQ(peers.heard[0].rank, 2);
  EXPECT_EQ(peers.heard[0].cause, "disk full");
  EXPECT_EQ(peers.heard[0].status, ExitStatus::checkpoint);
}

TEST(ProgressEngine, WhoIsEndedByAPeerPassesOnWhereItBegan) {
  Peers peers;
  const auto engine = engine_of(peers);
  peers.said = FailureReport{1, "loss is not finite", ExitStatus::numerical};
  EXPECT_THAT(health_of(*engine), HasSubstr("[rank 2] barrier in end: rank 1 failed: loss is not finite"));
  EXPECT_EQ(status_of(*engine), ExitStatus::numerical);
  // A program's own report of the error that it got: its peers must not hear of a failure of rank 2.
  engine->post_failure("barrier in end: rank 1 failed: loss is not finite", ExitStatus::communication, 1);
  ASSERT_EQ(peers.heard.size(), 1U);
  EXPECT_EQ(peers.heard[0].rank, 1);
  EXPECT_EQ(peers.heard[0].cause, "loss is not finite");
  EXPECT_EQ(peers.heard[0].status, ExitStatus::numerical);
}

}  // namespace
}  // namespace tranche::comm
