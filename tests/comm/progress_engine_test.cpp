/// The progress engine: overlap with compute, the staging buffer, traces, and the propagation of failures.
#include "comm/transport/progress_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <vector>

#include "tranche/comm/backends.h"
#include "tranche/core/error.h"
#include "tranche/core/trace.h"
#include "tranche/device/ledger.h"
#include "tranche/device/memory_resources.h"

namespace tranche::comm {
namespace {

using testing::HasSubstr;

/// The scripted peers of rank 2 of 4.
struct Peers {
  std::optional<FailureReport> said;
  std::vector<FailureReport> heard;  ///< failures that the peers received
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
  // Without a thread progress is made when the test calls.
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
  // A program reports the error that it received from a peer. Its own peers must not take that for a failure
  // of rank 2.
  engine->post_failure("barrier in end: rank 1 failed: loss is not finite", ExitStatus::communication, 1);
  ASSERT_EQ(peers.heard.size(), 1U);
  EXPECT_EQ(peers.heard[0].rank, 1);
  EXPECT_EQ(peers.heard[0].cause, "loss is not finite");
  EXPECT_EQ(peers.heard[0].status, ExitStatus::numerical);
}

const OperationLabel label{"h.3", "backward"};

CommunicatorOptions options() {
  CommunicatorOptions result;
  result.timeout_seconds = 60;
  result.staging_bytes = 64 << 10;
  return result;
}

TEST(ProgressEngine, CollectivesMoveWhileTheIssuingThreadsCompute) {
  // After the issue no issuing thread waits or calls anything until every rank has seen its sum arrive. So
  // only the communicator's own thread can have moved it.
  constexpr int ranks = 3;
  std::latch arrived(ranks);
  run_thread_ranks(ranks, [&](int, const CommunicatorFactory& factory) {
    const auto comm = factory(options());
    std::vector<float> full(ranks * 50000, 1.0f), out(50000);
    const Event done = comm->reduce_scatter(full.data(), DataType::float32, out.data(), DataType::float32,
                                            50000, {}, {}, label);
    double work = 1;
    while (!done.query()) work = work * 1.0000001 + 1e-9;  // "compute"
    arrived.count_down();
    arrived.wait();
    EXPECT_EQ(out[49999], 3.0f);
    EXPECT_GT(work, 0);
  });
}

TEST(ProgressEngine, AReductionThatWaitsForALateRankLeavesASlotToLaterOnes) {
  // Rank 0 is ready for the first sum at once and so holds a slot, but rank 1 is late. The second sum, larger
  // than the staging buffer, must still complete on both.
  std::latch second_done(2);
  run_thread_ranks(2, [&](int rank, const CommunicatorFactory& factory) {
    const auto comm = factory(options());
    const auto gate = std::make_shared<HostEvent>();
    std::vector<Event> ready;
    if (rank == 1) ready.emplace_back(gate);
    std::vector<float> full(2 * 60000, 1.0f), first(60000), second(60000);
    const auto issue = [&](std::vector<float>& out, std::span<const Event> after) {
      return comm->reduce_scatter(full.data(), DataType::float32, out.data(), DataType::float32, 60000, {},
                                  after, label);
    };
    const Event late = issue(first, ready), early = issue(second, {});
    early.wait();
    EXPECT_FALSE(late.query());  // checked before the other rank may open the gate
    second_done.arrive_and_wait();
    gate->complete();
    late.wait();
    EXPECT_EQ(first, second);
  });
}

TEST(ProgressEngine, TheStagingBufferIsOneAllocationMadeAtConstruction) {
  run_thread_ranks(3, [](int, const CommunicatorFactory& factory) {
    Ledger ledger;
    const auto host = make_host_resource(Tier::device);
    TrackingResource memory(*host, ledger);
    {
      CommunicatorOptions with_memory = options();
      with_memory.memory = &memory;
      const auto comm = factory(with_memory);
      EXPECT_EQ(memory.calls(), 1);
      EXPECT_EQ(ledger.account(Tier::device).current[Category::communication], 64 << 10);
      std::vector<float> full(3 * 30000), out(30000);
      comm->reduce_scatter(full.data(), DataType::float32, out.data(), DataType::float32, 30000, {}, {},
                           label)
          .wait();
      const auto part = comm->split(0, 0);
      part->barrier(label).wait();
      EXPECT_EQ(memory.calls(), 1) << "nothing is allocated after construction, by split neither";
    }
    EXPECT_EQ(memory.live(), 0);
  });
}

TEST(ProgressEngine, OneRankTakesNoStagingBuffer) {
  Ledger ledger;
  const auto host = make_host_resource(Tier::device);
  TrackingResource memory(*host, ledger);
  CommunicatorOptions with_memory = options();
  with_memory.memory = &memory;
  const auto self = make_self_communicator(with_memory);
  const auto meta = make_meta_communicator(0, 1, 1, with_memory);
  EXPECT_EQ(memory.calls(), 0);
}

TEST(ProgressEngine, EveryOperationLeavesASpan) {
  TraceRecorder trace(0);
  run_thread_ranks(2, [&](int rank, const CommunicatorFactory& factory) {
    CommunicatorOptions traced = options();
    if (rank == 0) traced.trace = &trace;
    const auto comm = factory(traced);
    double value = 1;
    comm->all_reduce(&value, 1, DataType::float64, ReduceOperation::sum, {"h.3", "norm"}).wait();
    comm->barrier({"", "end"}).wait();
  });
  EXPECT_EQ(trace.size(), 2);
  EXPECT_THAT(trace.to_json(), testing::HasSubstr("all_reduce of unit h.3 in norm"));
  EXPECT_THAT(trace.to_json(), testing::HasSubstr("barrier in end"));
}

}  // namespace
}  // namespace tranche::comm
