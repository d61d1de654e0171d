/// Failures of collectives on device memory: time-outs, ranks that end, calls that do not match. The texts
/// are those of the host communicators.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "core/clock.h"
#include "tests/comm/device_ranks.h"
#include "tests/core/rounds.h"
#include "tranche/core/error.h"

namespace tranche {
namespace {

using test::label;
using test::obstacle;
using test::OnDevice;
using test::Rank;
using test::run_device_ranks;
using test::transports;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;

/// A time-out in seconds that must not pass.
constexpr double long_timeout = 300;
/// A time-out that passes, and its text. Ranks make their communicators within it, too. Time of a GPU costs
/// more.
constexpr double brief = test::sanitized ? 6 : test::on_gpu ? 1 : 3;
const std::string after_brief = test::sanitized ? "after 6.0 s"
                                : test::on_gpu  ? "after 1.0 s"
                                                : "after 3.0 s";

class DeviceFailures : public testing::TestWithParam<comm::DeviceTransport> {
 protected:
  void SetUp() override {
    if (const std::string why = obstacle(GetParam(), 3); !why.empty()) GTEST_SKIP() << why;
  }
};

/// `status`: the status of a peer that failed by an exception.
std::string failure_of(const std::function<void()>& work, ExitStatus status = ExitStatus::communication) {
  try {
    work();
  } catch (const CommunicationError& error) {
    EXPECT_EQ(static_cast<int>(error.exit_status()), static_cast<int>(status));
    return error.what();
  } catch (const std::exception& error) {
    return std::string("not a CommunicationError: ") + error.what();
  }
  return "no CommunicationError";
}

/// A reduce_scatter of 100 elements per rank; its buffers exist as long as the rank.
struct Sum {
  OnDevice<float> full, out;
  explicit Sum(Rank& rank)
      : full(*rank.device, std::vector<float>(static_cast<std::size_t>(100 * rank.comm->size()), 1.0f)),
        out(*rank.device, std::vector<float>(100)) {}
  Event operator()(Communicator& comm, std::span<const Event> ready = {}) {
    return comm.reduce_scatter(full.data(), DataType::float32, out.data(), DataType::float32, 100, {}, ready,
                               label);
  }
};

/// Lets a rank hang until its peers have seen it. Throws if a peer fails otherwise.
void await(Rank& mine, const std::function<bool()>& over) {
  while (!over()) {
    mine.comm->check_health();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST_P(DeviceFailures, ARankThatHangsEndsAllWithinTheTimeOutAndIsNamed) {
  const detail::Stopwatch watch;
  std::barrier both(2);  // ranks 0 and 2 begin together, so that neither waits for the other
  std::atomic<int> ended{0};
  std::mutex mutex;
  std::vector<std::string> texts;
  run_device_ranks(
      3, GetParam(),
      [&](int rank, Rank& mine) {
        Sum sum(mine);
        if (rank == 1) {
          await(mine, [&] { return ended == 2; });
          return;
        }
        both.arrive_and_wait();
        const std::string text = failure_of([&] { sum(*mine.comm).wait(); });
        {
          const std::lock_guard lock(mutex);
          texts.push_back(text);
        }
        ++ended;
      },
      brief);
  for (const std::string& text : texts) {
    if (GetParam() == comm::DeviceTransport::nccl) {  // NCCL does not report which rank is missing
      EXPECT_THAT(text, HasSubstr("] reduce_scatter of unit h.3 in backward: not done " + after_brief));
      continue;
    }
    EXPECT_THAT(text, HasSubstr("reduce_scatter of unit h.3 in backward: no data from rank 1 " + after_brief +
                                " (rank 1 has not entered the operation, or hangs)"));
  }
  EXPECT_LT(watch.seconds(), 60);
}

TEST_P(DeviceFailures, ARankThatEndsBeforeItsPeersTellsThem) {
  const detail::Stopwatch watch;
  std::string text;
  run_device_ranks(
      2, GetParam(),
      [&](int rank, Rank& mine) {
        Sum sum(mine);
        sum(*mine.comm).wait();
        if (rank == 1) return;
        text = failure_of([&] { sum(*mine.comm).wait(); });
      },
      long_timeout);
  EXPECT_THAT(text, AllOf(HasSubstr("reduce_scatter of unit h.3 in backward: "),
                          HasSubstr("rank 1 has ended its engine after ")));
  EXPECT_LT(watch.seconds(), long_timeout / 2);
}

TEST_P(DeviceFailures, APeerWhoseComputeNeverGetsThereIsATimeOutToo) {
  // Rank 1 has issued the call, but its ready event never passes.
  std::atomic<bool> ended{false};
  std::string text;
  run_device_ranks(
      2, GetParam(),
      [&](int rank, Rank& mine) {
        Sum sum(mine);
        const auto gate = std::make_shared<HostEvent>();
        const std::vector<Event> never{Event(gate)};
        Event done;
        const auto issue = [&] { done = sum(*mine.comm, rank == 1 ? never : std::vector<Event>{}); };
        if (rank == 0) {
          text = failure_of([&] {
            issue();
            done.wait();
          });
          ended = true;
          return;
        }
        issue();
        await(mine, [&] { return ended.load(); });
        mine.comm->post_failure("ended by the test", ExitStatus::communication, 1);
        EXPECT_THAT(failure_of([&] { done.wait(); }), HasSubstr("ended by the test"));
        gate->complete();
      },
      brief);
  EXPECT_THAT(text,
              HasSubstr(GetParam() == comm::DeviceTransport::nccl
                            ? "reduce_scatter of unit h.3 in backward: not done " + after_brief
                            : "reduce_scatter of unit h.3 in backward: no data from rank 1 " + after_brief));
}

TEST_P(DeviceFailures, SlowComputeOnThisRankIsNoTimeOut) {
  // Both ranks wait for the same work, so that neither begins before the other.
  const auto gate = std::make_shared<HostEvent>();
  std::barrier both(2, [&]() noexcept { gate->complete(); });
  run_device_ranks(
      2, GetParam(),
      [&](int, Rank& mine) {
        Sum sum(mine);
        const std::vector<Event> ready{Event(gate)};
        const Event done = sum(*mine.comm, ready);
        EXPECT_FALSE(done.wait_for(1.25 * brief));  // longer than the time-out
        both.arrive_and_wait();
        done.wait();
        EXPECT_EQ(sum.out.read()[99], 2.0f);
      },
      brief);
}

TEST_P(DeviceFailures, ARankThatThrowsEndsAllWithItsCause) {
  const detail::Stopwatch watch;
  std::atomic<int> echoes{0}, ready{0};
  try {
    run_device_ranks(
        3, GetParam(),
        [&](int rank, Rank& mine) {
          Sum sum(mine);
          sum(*mine.comm).wait();
          ++ready;
          while (ready < 3) std::this_thread::yield();
          if (rank == 2) throw NumericalError("20 steps skipped in a row");
          const std::string text = failure_of([&] { sum(*mine.comm).wait(); }, ExitStatus::numerical);
          EXPECT_THAT(
              text,
              HasSubstr("reduce_scatter of unit h.3 in backward: rank 2 failed: 20 steps skipped in a row"));
          EXPECT_THAT(failure_of([&] { sum(*mine.comm).wait(); }, ExitStatus::numerical),
                      HasSubstr("rank 2 failed: 20 steps skipped in a row"));
          EXPECT_THAT(failure_of([&] { mine.comm->barrier(label).wait(); }, ExitStatus::numerical),
                      HasSubstr("barrier of unit h.3 in backward: rank 2 failed: 20 steps skipped in a row"));
          ++echoes;
        },
        long_timeout);
    FAIL() << "nothing was thrown";
  } catch (const NumericalError& error) {
    EXPECT_THAT(error.what(), HasSubstr("[rank 2] 20 steps skipped in a row"));
  }
  EXPECT_EQ(echoes, 2);
  EXPECT_LT(watch.seconds(), long_timeout / 2);
}

TEST_P(DeviceFailures, WorkThatFailedBeforeAnOperationFailsItHereAndAtThePeers) {
  std::string at_peer;
  try {
    run_device_ranks(
        2, GetParam(),
        [&](int rank, Rank& mine) {
          Sum sum(mine);
          const auto broken = std::make_shared<HostEvent>();
          if (rank == 1)
            broken->fail(std::make_exception_ptr(NumericalError("kernel failed")));
          else
            broken->complete();
          const std::vector<Event> ready{Event(broken)};
          const auto call = [&] { sum(*mine.comm, ready).wait(); };
          if (rank == 0) {
            at_peer = failure_of(
                [&] {
                  call();
                  // NCCL transfers what the failed work left; the failed rank's cause ends the next call.
                  if (GetParam() == comm::DeviceTransport::nccl) mine.comm->barrier(label).wait();
                },
                ExitStatus::numerical);
          } else {
            call();
          }
        },
        30);
    FAIL() << "nothing was thrown";
  } catch (const NumericalError& error) {
    EXPECT_THAT(error.what(), HasSubstr("kernel failed"));
  }
  EXPECT_THAT(at_peer, HasSubstr("of unit h.3 in backward: rank 1 failed: "));
  EXPECT_THAT(at_peer, HasSubstr("kernel failed"));
}

TEST_P(DeviceFailures, ASenderWhoseDataNobodyTakesSaysSo) {
  std::atomic<bool> ended{false};
  run_device_ranks(
      2, GetParam(),
      [&](int rank, Rank& mine) {
        OnDevice<float> value(*mine.device, {1.0f});
        if (rank == 0) {
          EXPECT_THAT(
              failure_of([&] { mine.comm->send(value.data(), 1, DataType::float32, 1, {}, {}).wait(); }),
              HasSubstr("send: rank 1 has not taken the data of this rank " + after_brief));
          ended = true;
        }
        await(mine, [&] { return ended.load(); });
      },
      brief);
}

TEST_P(DeviceFailures, CallsThatDoNotMatchAreFound) {
  // NCCL cannot detect this; the sequence hash, compared at every step's end, must.
  if (GetParam() == comm::DeviceTransport::nccl) return;
  try {
    run_device_ranks(
        2, GetParam(),
        [](int rank, Rank& mine) {
          OnDevice<float> full(*mine.device, std::vector<float>(200));
          mine.comm
              ->all_gather(full.data() + rank * (10 + rank), full.data(), 10 + rank, DataType::float32, 0, {},
                           label)
              .wait();
        },
        30);
    FAIL() << "nothing was thrown";
  } catch (const CommunicationError& error) {
    EXPECT_THAT(error.what(), AnyOf(HasSubstr("rank 0 sent 40 bytes where rank 1 expects 44"),
                                    HasSubstr("rank 1 sent 44 bytes where rank 0 expects 40")));
    EXPECT_THAT(error.what(), HasSubstr("the ranks' calls differ"));
  }
}

TEST_P(DeviceFailures, PartsThatDoNotMatchAreFound) {
  if (GetParam() == comm::DeviceTransport::nccl)
    return;  // NCCL cannot detect this, and no hash contains
             // these counts
  try {
    run_device_ranks(
        3, GetParam(),
        [](int rank, Rank& mine) {
          OnDevice<float> sent(*mine.device, std::vector<float>(30)),
              received(*mine.device, std::vector<float>(30));
          std::vector<RankElements> sends{{0, 5}, {10, 5}, {20, 5}}, receives = sends;
          if (rank == 1) sends[2].count = 0;
          mine.comm->all_to_all_v(sent.data(), sends, received.data(), receives, DataType::float32, {}, label)
              .wait();
        },
        30);
    FAIL() << "nothing was thrown";
  } catch (const CommunicationError& error) {
    EXPECT_THAT(
        error.what(),
        HasSubstr("all_to_all_v of unit h.3 in backward: rank 1 sent 0 bytes where rank 2 expects 20: "
                  "the ranks' calls differ"));
  }
}

TEST_P(DeviceFailures, ARankThatDoesNotSendItsPartsIsNamed) {
  std::atomic<bool> ended{false};
  std::string text;
  run_device_ranks(
      2, GetParam(),
      [&](int rank, Rank& mine) {
        OnDevice<float> sent(*mine.device, std::vector<float>(3)),
            received(*mine.device, std::vector<float>(3));
        const std::vector<RankElements> parts{{0, 1}, {1, 2}};
        if (rank == 0) {
          text = failure_of([&] {
            mine.comm->all_to_all_v(sent.data(), parts, received.data(), parts, DataType::float32, {}, label)
                .wait();
          });
          ended = true;
        }
        await(mine, [&] { return ended.load(); });
      },
      brief);
  EXPECT_THAT(text,
              HasSubstr(GetParam() == comm::DeviceTransport::nccl
                            ? "all_to_all_v of unit h.3 in backward: not done " + after_brief
                            : "all_to_all_v of unit h.3 in backward: no data from rank 1 " + after_brief));
}

TEST_P(DeviceFailures, UnwindingDoesNotWaitForPeers) {
  const detail::Stopwatch watch;
  std::string at_peer;
  try {
    run_device_ranks(
        2, GetParam(),
        [&](int rank, Rank& mine) {
          Sum sum(mine);
          const std::vector<Event> never{Event(std::make_shared<HostEvent>())};
          const auto issue = [&] { return sum(*mine.comm, never); };
          if (rank == 1) {
            const Event pending = issue();
            throw NumericalError("elsewhere");
          }
          at_peer = failure_of([&] { issue().wait(); }, ExitStatus::numerical);
        },
        long_timeout);
    FAIL() << "nothing was thrown";
  } catch (const NumericalError& error) {
    EXPECT_THAT(error.what(), HasSubstr("elsewhere"));
  }
  EXPECT_THAT(at_peer, HasSubstr("rank 1 failed: elsewhere"));
  EXPECT_LT(watch.seconds(), long_timeout / 2);
}

INSTANTIATE_TEST_SUITE_P(Transports, DeviceFailures, testing::ValuesIn(transports()),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace tranche
