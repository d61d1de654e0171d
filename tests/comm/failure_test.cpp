/// Failures that end a group: time-outs, posted failures, ranks that throw or hang, calls that do not match.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <latch>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "comm/rank_names.h"
#include "core/clock.h"
#include "tests/comm/common_start.h"
#include "tranche/comm/backends.h"
#include "tranche/core/error.h"
#include "tranche/device/event.h"

namespace tranche {
namespace {

using comm::RankNames;
using detail::Stopwatch;
using testing::AnyOf;
using testing::HasSubstr;
using testing::Not;

/// A time-out in seconds that must not pass.
constexpr double long_timeout = 300;
/// A bound in seconds of tests whose time-outs pass: far longer than any of them.
constexpr double bounded = 60;

const OperationLabel label{"h.3", "backward"};

/// Every test runs with messages, and with ranks that read each other's memory.
class Failures : public testing::TestWithParam<NodeCollectives> {
 protected:
  static CommunicatorOptions with_timeout(double seconds) {
    CommunicatorOptions options;
    options.timeout_seconds = seconds;
    options.staging_bytes = 64 << 10;
    options.collectives = GetParam();
    return options;
  }
};
INSTANTIATE_TEST_SUITE_P(Ways, Failures, testing::Values(NodeCollectives::messages, NodeCollectives::shared),
                         [](const auto& way) { return std::string(name_of(way.param)); });

Event sum(Communicator& comm, const std::vector<float>& full, std::vector<float>& out,
          std::span<const Event> ready = {}) {
  const auto count = static_cast<std::int64_t>(out.size());
  return comm.reduce_scatter(full.data(), DataType::float32, out.data(), DataType::float32, count, {}, ready,
                             label);
}

/// `status`: the status of a peer that reported a failure.
std::string failure_of(const std::function<void()>& work, ExitStatus status = ExitStatus::communication) {
  try {
    work();
  } catch (const CommunicationError& error) {
    EXPECT_EQ(static_cast<int>(error.exit_status()), static_cast<int>(status));
    return error.what();
  }
  return "no CommunicationError";
}

/// Rank 1 issues two sums and ends `after` seconds later, while rank 0 waits in its third. Returns rank 0's
/// text.
std::string text_of_the_one_left(const CommunicatorOptions& options, double after) {
  const ThreadGroup group(2);
  std::string text;
  std::thread leaver([&] {
    const auto comm = group.communicator(1, options);
    std::vector<float> full(200), out(100);
    for (int i = 0; i < 2; ++i) sum(*comm, full, out).wait();
    std::this_thread::sleep_for(std::chrono::duration<double>(after));
  });
  {
    const auto comm = group.communicator(0, options);
    std::vector<float> full(200), out(100);
    for (int i = 0; i < 2; ++i) sum(*comm, full, out).wait();
    text = failure_of([&] { sum(*comm, full, out).wait(); });
  }
  leaver.join();
  return text;
}

TEST_P(Failures, ARankThatEndsBeforeItsPeersTellsThemAtOnce) {
  // Rank 1 may end before or after a peer asks.
  for (const double after : {0.0, 0.4}) {
    const Stopwatch watch;
    EXPECT_THAT(
        text_of_the_one_left(with_timeout(long_timeout), after),
        HasSubstr("[rank 0] reduce_scatter of unit h.3 in backward: rank 1 has ended its engine after 2 "
                  "operations"));
    EXPECT_LT(watch.seconds(), long_timeout / 2);
  }
}

TEST_P(Failures, RanksThatEndInOrderSayNothingHoweverLateOneIs) {
  const ThreadGroup group(2);
  std::thread late([&] {
    const auto comm = group.communicator(1, with_timeout(60));
    std::vector<float> full(200), out(100);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // its peer asks meanwhile
    sum(*comm, full, out).wait();
    comm->check_health();
  });
  {
    const auto comm = group.communicator(0, with_timeout(60));
    std::vector<float> full(200), out(100);
    EXPECT_NO_THROW(sum(*comm, full, out).wait());
  }
  late.join();
}

TEST_P(Failures, ATimeOutNamesOperationUnitPhaseAndTheMissingRank) {
  const ThreadGroup group(3);
  const auto first = group.communicator(0, with_timeout(2)), second = group.communicator(1, with_timeout(2));
  std::vector<float> full(300), out(100), other(100);
  const Stopwatch watch;
  // Rank 2 has not started. Both calls begin at once, so that neither rank waits for the other.
  const auto gate = std::make_shared<HostEvent>();
  const std::vector<Event> ready{Event(gate)};
  const Event of_first = sum(*first, full, out, ready), of_second = sum(*second, full, other, ready);
  gate->complete();
  EXPECT_THAT(failure_of([&] { of_first.wait(); }),
              HasSubstr("[rank 0] reduce_scatter of unit h.3 in backward: no data from rank 2 after 2.0 s "
                        "(rank 2 has not entered the operation, or hangs)"));
  EXPECT_THAT(failure_of([&] { of_second.wait(); }),
              HasSubstr("[rank 1] reduce_scatter of unit h.3 in backward: no data from rank 2 after 2.0 s"));
  EXPECT_LT(watch.seconds(), bounded) << "far beyond the time-out";
}

TEST_P(Failures, ATimeOutNamesAllMissingRanks) {
  const ThreadGroup group(4);
  const auto comm = group.communicator(1, with_timeout(0.1));
  EXPECT_THAT(
      failure_of([&] {
        comm->barrier({"", "start"}).wait();
      }),
      HasSubstr("barrier in start: no data from ranks 2, 3 and 0 after 0.1 s (ranks 2, 3 and 0 have not "
                "entered the operation, or hang)"));
}

TEST_P(Failures, RanksOfAMeshAreNamedWithTheirCoordinates) {
  const ThreadGroup group(6);
  CommunicatorOptions options = with_timeout(long_timeout);
  options.mesh = "replicate=2, shard=*";
  const auto comm = group.communicator(0, options), other = group.communicator(1, options);
  const float value = 1;
  float values[2];
  const Event unlike = other->recv(values, 2, DataType::float32, 0, {}, {});
  EXPECT_THAT(failure_of([&] { comm->send(&value, 1, DataType::float32, 1, {}, {}).wait(); }),
              HasSubstr("rank 0 (replicate 0, shard 0) sent 4 bytes where rank 1 (replicate 0, shard 1) "
                        "expects 8: the ranks' calls differ"));
  CommunicatorOptions soon = options;
  soon.timeout_seconds = 0.1;
  const auto last = group.communicator(5, soon);
  EXPECT_THAT(
      failure_of([&] {
        last->barrier({"", "start"}).wait();
      }),
      HasSubstr(
          "barrier in start: no data from ranks 0 (replicate 0, shard 0), 1 (replicate 0, shard 1), "
          "2 (replicate 0, shard 2), 3 (replicate 1, shard 0) and 4 (replicate 1, shard 1) after 0.1 s"));
  group.post_failure(4, "disk on fire", ExitStatus::checkpoint);
  EXPECT_THAT(failure_of([&] { group.communicator(3, options)->barrier({}).wait(); }, ExitStatus::checkpoint),
              HasSubstr("rank 4 (replicate 1, shard 1) failed: disk on fire"));
}

TEST(RankNames, AreNumbersWhereTheMeshIsNoneOfTheJob) {
  EXPECT_EQ(RankNames().of(3), "rank 3");
  EXPECT_EQ(RankNames("shard=*", 6).of(3), "rank 3");
  EXPECT_EQ(RankNames("replicate=4, shard=*", 6).of(3), "rank 3") << "the start refuses it";
  EXPECT_EQ(RankNames("replicate=2, shard=*", 6).of(3), "rank 3 (replicate 1, shard 0)");
}

TEST_P(Failures, ASenderWhoseDataNobodyTakesSaysSo) {
  const ThreadGroup group(2);
  const auto comm = group.communicator(0, with_timeout(0.1));
  const float value = 1;
  EXPECT_THAT(failure_of([&] { comm->send(&value, 1, DataType::float32, 1, {}, {}).wait(); }),
              HasSubstr("send: rank 1 has not taken the data of this rank after 0.1 s"));
}

TEST_P(Failures, SlowComputeOnThisRankIsNoTimeOut) {
  // Both ranks wait for the same work, so that neither begins before the other.
  const auto gate = std::make_shared<HostEvent>();
  std::barrier both(2, [&]() noexcept { gate->complete(); });
  run_thread_ranks(2, [&](int, const CommunicatorFactory& factory) {
    const auto comm = factory(with_timeout(2));
    std::vector<float> full(200, 1.0f), out(100);
    const std::vector<Event> ready{Event(gate)};
    const Event done = sum(*comm, full, out, ready);
    EXPECT_FALSE(done.wait_for(2.5));  // longer than the time-out
    both.arrive_and_wait();
    done.wait();
    EXPECT_EQ(out[99], 2.0f);
  });
}

TEST_P(Failures, APostedFailureEndsPendingAndLaterOperationsOfPeers) {
  const ThreadGroup group(3);
  std::vector<std::thread> threads;
  std::string pending[3], later[3];
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      const auto comm = group.communicator(rank, with_timeout(30));
      std::vector<float> full(300), out(100);
      if (rank == 2) {
        comm->post_failure("token file train.bin is truncated", ExitStatus::configuration, 2);
      } else {
        pending[rank] = failure_of([&] { sum(*comm, full, out).wait(); }, ExitStatus::configuration);
      }
      later[rank] = failure_of([&] { comm->barrier({"", "end"}).wait(); }, ExitStatus::configuration);
    });
  }
  for (auto& thread : threads) thread.join();
  const std::string cause = "rank 2 failed: token file train.bin is truncated";
  EXPECT_THAT(pending[0], HasSubstr("[rank 0] reduce_scatter of unit h.3 in backward: " + cause));
  EXPECT_THAT(pending[1], HasSubstr(cause));
  for (const auto& text : later) EXPECT_THAT(text, HasSubstr("barrier in end: " + cause));
}

TEST_P(Failures, OperationsBehindATimeOutSayWhatEndedThem) {
  const ThreadGroup group(2);
  const auto comm = group.communicator(0, with_timeout(0.1));
  const auto never = std::make_shared<HostEvent>();
  const std::vector<Event> ready{Event(never)};
  std::vector<float> full(200), out(100), other(100);
  const Event waiting = sum(*comm, full, out, ready);
  EXPECT_THAT(failure_of([&] { sum(*comm, full, other).wait(); }), HasSubstr("no data from rank 1"));
  EXPECT_THAT(
      failure_of([&] { waiting.wait(); }),
      HasSubstr("reduce_scatter of unit h.3 in backward: ended by the failure of reduce_scatter of unit h.3 "
                "in backward: no data from rank 1 after 0.1 s"));
}

TEST_P(Failures, TheFirstCauseIsRethrownWithItsRankNotTheEchoes) {
  try {
    run_thread_ranks(4, [](int rank, const CommunicatorFactory& factory) {
      const auto comm = factory(with_timeout(30));
      if (rank == 3) throw NumericalError("20 steps skipped in a row");
      comm->barrier(label).wait();
    });
    FAIL() << "nothing was thrown";
  } catch (const NumericalError& error) {
    EXPECT_THAT(error.what(), HasSubstr("[rank 3] 20 steps skipped in a row"));
  }
}

TEST_P(Failures, AnExceptionThatIsNotOursIsRethrownToo) {
  EXPECT_THROW(run_thread_ranks(2,
                                [](int rank, const CommunicatorFactory& factory) {
                                  const auto comm = factory(with_timeout(30));
                                  if (rank == 1) throw std::out_of_range("index");
                                  comm->barrier(label).wait();
                                }),
               std::out_of_range);
}

TEST_P(Failures, ARankThatHangsEndsAllWithinTheTimeOut) {
  const Stopwatch watch;
  std::atomic<bool> release{false};
  std::atomic<int> ended{0};
  // The sums of ranks 0 and 2 begin when both have been issued, so that neither waits for the other.
  const auto gate = std::make_shared<HostEvent>();
  std::barrier both(2, [&]() noexcept { gate->complete(); });
  test::CommonStart start(3);
  try {
    run_thread_ranks(3, [&](int rank, const CommunicatorFactory& factory) {
      test::CommonStart::Rank started(start);
      const auto comm = factory(with_timeout(2));
      started.await_others();
      if (rank == 1) {
        while (!release)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));  // until all others have ended
        return;
      }
      std::vector<float> full(300), out(100);
      const std::vector<Event> ready{Event(gate)};
      const Event done = sum(*comm, full, out, ready);
      both.arrive_and_wait();
      try {
        done.wait();
      } catch (...) {
        if (++ended == 2) release = true;
        throw;
      }
    });
    FAIL() << "nothing was thrown";
  } catch (const CommunicationError& error) {
    EXPECT_THAT(error.what(),
                HasSubstr("reduce_scatter of unit h.3 in backward: no data from rank 1 after 2.0 s"));
  }
  EXPECT_LT(watch.seconds(), bounded);
}

/// How each rank's call ended, and after how many seconds.
struct Ends {
  std::string texts[4];
  double seconds[4] = {};
};

/// Ranks `there` of `size` ranks, two per declared node, issue a gather or a reduce-scatter, which begin at
/// once; the others have not started. No rank posts its failure, so that each finds the cause by itself.
Ends collective_across_nodes(int size, std::initializer_list<int> there, bool gather, double timeout) {
  const ThreadGroup group(size);
  Ends ends;
  const auto gate = std::make_shared<HostEvent>();
  std::optional<Stopwatch> watch;  // no operation begins before it
  std::barrier issued(static_cast<std::ptrdiff_t>(there.size()), [&]() noexcept {
    watch.emplace();
    gate->complete();
  });
  std::vector<std::thread> threads;
  for (const int rank : there) {
    threads.emplace_back([&, rank] {
      CommunicatorOptions options;
      options.timeout_seconds = timeout;
      options.staging_bytes = 64 << 10;
      options.collectives = NodeCollectives::shared;
      options.local_size = 2;
      const auto comm = group.communicator(rank, options);
      std::vector<float> full(static_cast<std::size_t>(size) * 100), shard(100);
      const std::vector<Event> ready{Event(gate)};
      const Event done =
          gather ? comm->all_gather(shard.data(), full.data(), 100, DataType::float32, 0, ready, label)
                 : comm->reduce_scatter(full.data(), DataType::float32, shard.data(), DataType::float32, 100,
                                        {2, false, 0}, ready, label);
      issued.arrive_and_wait();
      ends.texts[rank] = failure_of([&] { done.wait(); });
      ends.seconds[rank] = watch->seconds();
    });
  }
  for (auto& thread : threads) thread.join();
  return ends;
}

/// Runs `body` on all ranks and returns the text that each throws, empty if it returns. The last rank
/// receives `until_others_end`.
std::vector<std::string> texts_of_a_chain(
    int ranks, const CommunicatorOptions& options,
    const std::function<void(Communicator&, const std::function<void()>&)>& body) {
  std::vector<std::string> texts(static_cast<std::size_t>(ranks));
  std::atomic<int> ended = 0;
  test::CommonStart start(ranks);
  try {
    run_thread_ranks(ranks, [&](int rank, const CommunicatorFactory& factory) {
      test::CommonStart::Rank started(start);
      const auto comm = factory(options);
      started.await_others();
      try {
        body(*comm, [&] {
          while (ended == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        });
      } catch (const CommunicationError& error) {
        texts[static_cast<std::size_t>(rank)] = error.what();
        ++ended;
        throw;
      }
    });
  } catch (const CommunicationError&) {  // its text is in `texts`
  }
  return texts;
}

void receive(Communicator& comm, int from) {
  float value = 0;
  comm.recv(&value, 1, DataType::float32, from, {}, label).wait();
}

// The rank that has waited longest is farthest from the cause.
TEST_P(Failures, AlongAChainOfMessagesTheRankThatHangsIsNamed) {
  const auto texts =
      texts_of_a_chain(4, with_timeout(4), [](Communicator& comm, const auto& until_others_end) {
        if (comm.rank() == 3) return until_others_end();
        std::this_thread::sleep_for(std::chrono::milliseconds(200) * comm.rank());
        receive(comm, comm.rank() + 1);
      });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_THAT(texts[static_cast<std::size_t>(rank)], HasSubstr("no data from rank 3 after 4.0 s")) << rank;
  }
}

TEST_P(Failures, ARankThatHasWaitedAndHangsThenIsNamed) {
  const float value = 1;
  const auto texts =
      texts_of_a_chain(3, with_timeout(4), [&](Communicator& comm, const auto& until_others_end) {
        if (comm.rank() == 0) return receive(comm, 1);
        if (comm.rank() == 1) {
          receive(comm, 2);
          return until_others_end();
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(500));
        comm.send(&value, 1, DataType::float32, 1, {}, label).wait();
        until_others_end();
      });
  EXPECT_THAT(texts[0], HasSubstr("no data from rank 1 after 4.0 s (rank 1 has not entered the operation"));
}

// Reports of long waits may reach ranks that have ended, and must not end any rank.
TEST_P(Failures, RanksThatWaitForLongEndInOrder) {
  const float value = 1;
  const auto texts = texts_of_a_chain(3, with_timeout(30), [&](Communicator& comm, const auto&) {
    for (int round = 0; round < 3; ++round) {
      if (comm.rank() < 2) receive(comm, comm.rank() + 1);
      if (comm.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(150));
      if (comm.rank() > 0) comm.send(&value, 1, DataType::float32, comm.rank() - 1, {}, label).wait();
    }
    if (comm.rank() == 1) receive(comm, 2);
    if (comm.rank() == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(150));
      comm.send(&value, 1, DataType::float32, 1, {}, label).wait();
    }
  });
  EXPECT_THAT(texts, testing::Each(std::string()));
}

TEST(FailuresAcrossNodes, WhoSeesTheMissingRankNamesItFirst) {
  // Nodes {0, 1} and {2, 3}; rank 1 has not started. Rank 0 cannot form or send its node's sums, so ranks 2
  // and 3 receive nothing from that node.
  for (const bool gather : {false, true}) {
    const Ends ends = collective_across_nodes(4, {0, 2, 3}, gather, 2);
    const std::string what = gather ? "all_gather" : "reduce_scatter";
    const std::string no_data = what + " of unit h.3 in backward: no data from rank ";
    EXPECT_THAT(ends.texts[0], HasSubstr("[rank 0] " + no_data +
                                         "1 after 2.0 s (rank 1 has not entered the operation, or hangs)"));
    EXPECT_THAT(ends.texts[2],
                HasSubstr("[rank 2] " + no_data +
                          "0 after 2.0 s (rank 0, or a rank that it waits for, has not entered "
                          "the operation, or hangs)"));
    EXPECT_THAT(ends.texts[3], HasSubstr("[rank 3] " + no_data + "1 after 2.0 s (rank 1, or a rank that it"));
    EXPECT_GT(ends.seconds[2], 2.2) << "it leaves the word to rank 0";
    EXPECT_LT(ends.seconds[2], bounded);
  }
}

TEST(FailuresAcrossNodes, ARankAloneOnItsNodeIsMissingForSure) {
  const Ends ends = collective_across_nodes(3, {0, 1}, false, 2);
  for (const int rank : {0, 1}) {
    EXPECT_THAT(ends.texts[rank], HasSubstr("no data from rank 2 after 2.0 s (rank 2 has not entered the "
                                            "operation, or hangs)"));
  }
}

TEST_P(Failures, CallsThatDoNotMatchAreFound) {
  try {
    run_thread_ranks(2, [](int rank, const CommunicatorFactory& factory) {
      const auto comm = factory(with_timeout(30));
      std::vector<float> full(200);
      comm->all_gather(full.data() + rank * (10 + rank), full.data(), 10 + rank, DataType::float32, 0, {},
                       label)
          .wait();
    });
    FAIL() << "nothing was thrown";
  } catch (const CommunicationError& error) {
    EXPECT_THAT(error.what(), AnyOf(HasSubstr("rank 0 sent 40 bytes where rank 1 expects 44"),
                                    HasSubstr("rank 1 sent 44 bytes where rank 0 expects 40")));
    EXPECT_THAT(error.what(), HasSubstr("the ranks' calls differ"));
  }
}

/// The messages of two ranks whose third collectives differ, with a time-out far longer than the test waits.
std::array<std::string, 2> texts_of_calls_that_differ(
    CommunicatorOptions options, const std::function<void(Communicator&, std::vector<float>&)>& of_rank_0,
    const std::function<void(Communicator&, std::vector<float>&)>& of_rank_1) {
  options.timeout_seconds = long_timeout;
  const Stopwatch watch;
  const ThreadGroup group(2);
  std::array<std::string, 2> texts;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto comm = group.communicator(rank, options);
      std::vector<float> full(20000);
      for (int call = 0; call < 2; ++call) comm->barrier({"", "start"}).wait();
      texts[static_cast<std::size_t>(rank)] =
          failure_of([&] { (rank == 0 ? of_rank_0 : of_rank_1)(*comm, full); });
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_LT(watch.seconds(), long_timeout / 2);
  return texts;
}

void gather_of(Communicator& comm, std::vector<float>& full, const char* unit, std::int64_t count) {
  comm.all_gather(full.data() + comm.rank() * count, full.data(), count, DataType::float32, 0, {},
                  {unit, "forward"})
      .wait();
}

TEST_P(Failures, CallsOfEqualSizeThatDifferAreNamedOnBothRanks) {
  const std::string said =
      "rank 0 issued all_gather of unit a (number 2) where rank 1 issued reduce_scatter of unit b (number "
      "2): the "
      "ranks' calls differ";
  const auto texts = texts_of_calls_that_differ(
      with_timeout(30), [](Communicator& comm, std::vector<float>& full) { gather_of(comm, full, "a", 100); },
      [](Communicator& comm, std::vector<float>& full) {
        std::vector<float> out(100);
        comm.reduce_scatter(full.data(), DataType::float32, out.data(), DataType::float32, 100, {}, {},
                            {"b", "backward"})
            .wait();
      });
  EXPECT_THAT(texts[0], HasSubstr("[rank 0] all_gather of unit a in forward: " + said));
  EXPECT_THAT(texts[1], HasSubstr("[rank 1] reduce_scatter of unit b in backward: " + said));
}

TEST_P(Failures, TheSameOperationOfAnotherUnitIsAnotherCall) {
  const auto texts = texts_of_calls_that_differ(
      with_timeout(30),
      [](Communicator& comm, std::vector<float>& full) { gather_of(comm, full, "h.1", 100); },
      [](Communicator& comm, std::vector<float>& full) { gather_of(comm, full, "h.2", 100); });
  for (const std::string& text : texts) {
    EXPECT_THAT(text,
                HasSubstr("rank 0 issued all_gather of unit h.1 (number 2) where rank 1 issued all_gather of "
                          "unit h.2 (number 2)"));
  }
}

TEST_P(Failures, ARankThatHasGoneOnIsComparedByNumber) {
  // Rank 1 leaves out a gather and reaches its fourth call, which rank 0 issues as its fifth.
  const auto texts = texts_of_calls_that_differ(
      with_timeout(30),
      [](Communicator& comm, std::vector<float>& full) {
        gather_of(comm, full, "a", 100);
        gather_of(comm, full, "b", 100);
      },
      [](Communicator& comm, std::vector<float>& full) { gather_of(comm, full, "b", 100); });
  EXPECT_THAT(texts[0],
              HasSubstr("rank 0 issued all_gather of unit a (number 2) where rank 1 issued all_gather of "
                        "unit b (number 2)"));
}

TEST(FailuresOfMixedWays, OneRankByWindowAndItsPeerByMessages) {
  CommunicatorOptions options;
  options.staging_bytes = 64 << 10;
  const auto texts = texts_of_calls_that_differ(
      options, [](Communicator& comm, std::vector<float>& full) { gather_of(comm, full, "a", 100); },
      [](Communicator& comm, std::vector<float>& full) { gather_of(comm, full, "a", 8000); });
  for (const std::string& text : texts) {
    EXPECT_THAT(text,
                HasSubstr("rank 0 issued all_gather of unit a of 400 bytes (number 2) where rank 1 issued "
                          "all_gather of unit a of 32000 bytes (number 2): the ranks' calls differ"));
  }
}

TEST_P(Failures, ALateRankIsNoOtherCall) {
  run_thread_ranks(3, [](int rank, const CommunicatorFactory& factory) {
    const auto comm = factory(with_timeout(30));
    std::vector<float> full(300);
    for (int call = 0; call < 3; ++call) {
      if (rank == call) std::this_thread::sleep_for(std::chrono::milliseconds(250));
      gather_of(*comm, full, "a", 100);
    }
  });
}

struct Heard {
  std::string text;  ///< the error of rank 0 of two while rank 1 unwinds
  ExitStatus status = ExitStatus::other;
  double seconds = 0;        ///< until it came, after rank 0 was about to start the operation
  double until_cause = 300;  ///< seconds from before rank 1 said that it unwinds until it had told the cause
};
Heard heard_of_unwinding(const CommunicatorOptions& options, double seconds_to_cause) {
  const ThreadGroup group(2);
  Heard heard;
  std::string own;
  std::latch under_way(1);
  std::thread peer([&] {
    const auto comm = group.communicator(0, options);
    const Stopwatch watch;
    under_way.count_down();
    try {
      comm->barrier({"", "end"}).wait();
    } catch (const CommunicationError& error) {
      heard.text = error.what();
      heard.status = error.exit_status();
    }
    heard.seconds = watch.seconds();
  });
  const auto comm = group.communicator(1, options);
  float value = 0;
  const Event pending = comm->recv(&value, 1, DataType::float32, 0, {}, {});
  under_way.wait();
  const Stopwatch watch;
  comm->post_unwinding("an exception unwound it", 2);
  own = failure_of([&] { pending.wait(); });
  if (seconds_to_cause >= 0) {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds_to_cause));
    comm->post_failure("disk full", ExitStatus::checkpoint, 2);
    heard.until_cause = watch.seconds();
    comm->post_failure("something that came of it", ExitStatus::other, 2);
  }
  peer.join();
  EXPECT_THAT(own, HasSubstr("rank 1 failed: an exception unwound it")) << "its own operations end at once";
  return heard;
}

TEST_P(Failures, PeersOfARankThatUnwindsWaitForTheCause) {
  // Peers wait for two seconds. A cause that this busy machine tells later than that proves nothing.
  Heard heard;
  for (int attempt = 0; attempt < 5 && heard.until_cause > 1.9; ++attempt) {
    heard = heard_of_unwinding(with_timeout(30), 0.1);
  }
  EXPECT_THAT(heard.text, HasSubstr("[rank 0] barrier in end: rank 1 failed: disk full"));
  EXPECT_EQ(heard.status, ExitStatus::checkpoint);
  EXPECT_GE(heard.seconds, 0.1);
}

TEST_P(Failures, PeersOfARankThatUnwindsAndSaysNoMoreWaitTwoSeconds) {
  const Heard heard = heard_of_unwinding(with_timeout(long_timeout), -1);
  EXPECT_THAT(heard.text, HasSubstr("[rank 0] barrier in end: rank 1 failed: an exception unwound it"));
  EXPECT_EQ(heard.status, ExitStatus::communication);
  EXPECT_GE(heard.seconds, 1.5);
  EXPECT_LT(heard.seconds, long_timeout / 2);
}

TEST_P(Failures, WorkThatFailedBeforeAnOperationFailsIt) {
  const auto comm = make_self_communicator();
  const auto broken = std::make_shared<HostEvent>();
  broken->fail(std::make_exception_ptr(NumericalError("kernel failed")));
  const std::vector<Event> ready{Event(broken)};
  std::vector<float> values(10);
  EXPECT_THROW(sum(*comm, values, values, ready).wait(), NumericalError);
  sum(*comm, values, values).wait();  // the group itself still works
}

TEST_P(Failures, DestroyingACommunicatorAbandonsWhatIsPendingInBoundedTime) {
  const Stopwatch watch;
  Event pending;
  {
    const ThreadGroup group(2);
    const auto comm = group.communicator(0, with_timeout(0.2));
    const auto never = std::make_shared<HostEvent>();
    const std::vector<Event> ready{Event(never)};
    std::vector<float> full(200), out(100);
    pending = sum(*comm, full, out, ready);
  }
  EXPECT_THAT(failure_of([&] { pending.wait(); }),
              HasSubstr("its communicator was destroyed before it was done"));
  EXPECT_LT(watch.seconds(), bounded);
}

TEST_P(Failures, UnwindingDoesNotWaitForPeers) {
  const Stopwatch watch;
  const ThreadGroup group(2);
  const auto fail = [&] {
    const auto comm = group.communicator(0, with_timeout(long_timeout));
    std::vector<float> full(200), out(100);
    const Event pending = sum(*comm, full, out);
    throw NumericalError("elsewhere");
  };
  EXPECT_THROW(fail(), NumericalError);
  EXPECT_LT(watch.seconds(), long_timeout / 2);
}

TEST_P(Failures, AbortingAThreadRankFailsItsPeers) {
  const ThreadGroup group(2);
  const auto first = group.communicator(0, with_timeout(30)),
             second = group.communicator(1, with_timeout(30));
  second->abort_job(5);
  EXPECT_THAT(failure_of([&] { first->barrier(label).wait(); }),
              HasSubstr("rank 1 failed: aborted with status 5"));
}

TEST_P(Failures, APostToTheGroupReachesEveryRank) {
  const ThreadGroup group(2);
  const auto first = group.communicator(0, with_timeout(30)),
             second = group.communicator(1, with_timeout(30));
  const Event pending = first->barrier(label);
  group.post_failure(1, "watchdog", ExitStatus::out_of_memory);
  EXPECT_THAT(failure_of([&] { pending.wait(); }, ExitStatus::out_of_memory),
              HasSubstr("rank 1 failed: watchdog"));
  EXPECT_THAT(failure_of([&] { second->barrier(label).wait(); }, ExitStatus::out_of_memory),
              HasSubstr("rank 1 failed: watchdog"));
}

TEST_P(Failures, ASplitGroupFailsWithItsParentsRanks) {
  const ThreadGroup group(3);
  std::string text;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      const auto comm = group.communicator(rank, with_timeout(long_timeout));
      const auto pair = comm->split(rank == 0 ? 0 : 1, 0);
      if (rank == 1) text = failure_of([&] { pair->barrier(label).wait(); });
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_THAT(text, HasSubstr("rank 2 has ended its engine"));
}

std::string refusal_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.message();
  }
  return "not refused";
}

TEST(Arguments, AreRefusedWithTheOperationNamed) {
  const auto comm = make_self_communicator();
  float values[4] = {};
  EXPECT_EQ(refusal_of([&] { comm->all_gather(values, values, -1, DataType::float32, 0, {}, label); }),
            "all_gather of unit h.3 in backward: count -1 is negative");
  EXPECT_EQ(refusal_of([&] { comm->all_gather(nullptr, values, 1, DataType::float32, 0, {}, label); }),
            "all_gather of unit h.3 in backward: shard is a null pointer");
  EXPECT_EQ(refusal_of([&] { comm->all_gather(values, values, 1, DataType::float32, -4, {}, {}); }),
            "all_gather: bucket of -4 elements");
  EXPECT_EQ(refusal_of([&] {
              comm->reduce_scatter(values, DataType::float64, values, DataType::float32, 1, {}, {}, label);
            }),
            "reduce_scatter of unit h.3 in backward: sums fp32, bf16 and fp16, not fp64");
  EXPECT_EQ(refusal_of([&] {
              ReductionOptions options;
              options.givers = 0;
              comm->reduce_scatter(values, DataType::float32, values, DataType::float32, 1, options, {}, {});
            }),
            "reduce_scatter: 0 ranks give values");
  EXPECT_EQ(refusal_of([&] {
              ReductionOptions options;
              options.outer_group = 0;
              comm->reduce_scatter(values, DataType::float32, values, DataType::float32, 1, options, {}, {});
            }),
            "reduce_scatter: outer groups of 0 groups");
  EXPECT_EQ(
      refusal_of([&] {
        comm->reduce_scatter(values, DataType::float32, values, DataType::float32, 1, {1, false, -1}, {}, {});
      }),
      "reduce_scatter: bucket of -1 elements");
  EXPECT_EQ(refusal_of([&] {
              comm->all_reduce(values, 1, DataType::bfloat16, ReduceOperation::sum, {"", "norm"});
            }),
            "all_reduce in norm: reduces fp32, fp64 and int64, not bf16");
  EXPECT_EQ(refusal_of([&] { comm->broadcast(values, 1, DataType::float32, 1, {}, {}); }),
            "broadcast: root 1 is not a rank of this group of 1");
  EXPECT_EQ(refusal_of([&] { comm->send(values, 1, DataType::float32, 0, {}, {}); }),
            "send: the peer is this rank itself");
  EXPECT_EQ(refusal_of([&] { comm->recv(values, 1, DataType::float32, -1, {}, {}); }),
            "recv: peer -1 is not a rank of this group of 1");
  EXPECT_EQ(refusal_of([&] { comm->all_to_all(values, values, 1, DataType::float32, {}, {}); }),
            "all_to_all: sent and received are the same buffer");
  const std::vector<RankElements> one{{0, 1}}, two(2), early{{-1, 1}}, negative{{0, -1}}, none{{0, 0}};
  const auto exchange = [&](const std::vector<RankElements>& sends,
                            const std::vector<RankElements>& receives) {
    return refusal_of(
        [&] { comm->all_to_all_v(values, sends, values, receives, DataType::float32, {}, {}); });
  };
  EXPECT_EQ(exchange(two, one), "all_to_all_v: sent has 2 entries for 1 ranks");
  EXPECT_EQ(exchange(one, two), "all_to_all_v: received has 2 entries for 1 ranks");
  EXPECT_EQ(exchange(early, one), "all_to_all_v: sent begins at element -1");
  EXPECT_EQ(exchange(one, negative), "all_to_all_v: count -1 is negative");
  EXPECT_EQ(exchange(one, none), "all_to_all_v: the rank sends itself 1 elements and receives 0");
  EXPECT_THAT(refusal_of([&] {
                comm->all_gather(values, values, std::int64_t{1} << 62, DataType::float32, 0, {}, {});
              }),
              Not(HasSubstr("not refused")));
}

TEST(Arguments, OfGroupsAndStagingBuffers) {
  EXPECT_EQ(refusal_of([] { const ThreadGroup group(0); }), "a group of 0 thread ranks");
  const ThreadGroup group(4);
  EXPECT_EQ(refusal_of([&] { group.communicator(4); }), "rank 4 of a group of 4 thread ranks");
  CommunicatorOptions small;
  small.staging_bytes = 3071;
  EXPECT_EQ(refusal_of([&] { group.communicator(0, small); }),
            "a staging buffer of 3071 bytes cannot hold 256 fp32 elements from each of 3 peers; give "
            "tranche.communication_slab (staging_bytes in C++) at "
            "least 3072");
  const auto comm = group.communicator(1);
  EXPECT_EQ(refusal_of([&] { group.communicator(1); }),
            "the communicator of thread rank 1 has been made already");
  EXPECT_EQ(refusal_of([] { make_meta_communicator(3, 3, 1); }), "meta rank 3 of 3");
}

}  // namespace
}  // namespace tranche
