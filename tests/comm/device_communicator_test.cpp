/// Collectives on device memory: over the cpu device, whose streams run on threads of their own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <thread>

#include "tranche/comm/backends.h"
#include "tranche/comm/device_communicator.h"
#include "tranche/core/clock.h"
#include "tranche/core/error.h"
#include "tranche/device/ledger.h"
#include "tranche/device/memory_resources.h"
#include "tranche/tests/comm/collective_suite.h"
#include "tranche/tests/comm/ordered_bracket.h"

namespace tranche {
namespace {

using testing::AnyOf;
using testing::HasSubstr;

constexpr std::int64_t slab = 64 << 10;
const OperationLabel label{"h.3", "backward"};

CommunicatorOptions host_options(double timeout) {
  CommunicatorOptions result;
  result.timeout_seconds = timeout;
  result.slab_bytes = slab;
  return result;
}

DeviceCommunicatorOptions device_options(DeviceTransport transport, double timeout,
                                         std::int64_t slab_bytes = slab) {
  DeviceCommunicatorOptions result;
  result.transport = transport;
  result.timeout_seconds = timeout;
  result.slab_bytes = slab_bytes;
  return result;
}

/// A rank: a device of its own and a communicator over it.
struct Rank {
  std::unique_ptr<Device> device = make_device({});
  std::unique_ptr<Communicator> comm;
  Rank(DeviceTransport transport, std::unique_ptr<Communicator> host, double timeout = 60,
       std::int64_t slab_bytes = slab)
      : comm(make_device_communicator(*device, std::move(host),
                                      device_options(transport, timeout, slab_bytes))) {}
  test::SuitePlace place() const { return {device.get(), true}; }
};

using Body = std::function<void(int, Rank&)>;
void run_device_ranks(int size, DeviceTransport transport, const Body& body, double timeout = 60,
                      const FaultInjection& faults = {}, std::int64_t slab_bytes = slab) {
  run_thread_ranks(
      size,
      [&](int rank, const CommunicatorFactory& factory) {
        Rank mine(transport, factory(host_options(timeout)), timeout, slab_bytes);
        body(rank, mine);
      },
      faults);
}

struct Case {
  DeviceTransport transport;
  int ranks;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << name_of(c.transport) << " over " << c.ranks;
}

class DeviceRanks : public testing::TestWithParam<Case> {};

TEST_P(DeviceRanks, EveryCollectiveMatchesBruteForce) {
  run_device_ranks(GetParam().ranks, GetParam().transport,
                   [](int, Rank& rank) { test::check_everything(*rank.comm, slab, rank.place()); });
}

TEST_P(DeviceRanks, DelaysChangeNoBit) {
  run_device_ranks(GetParam().ranks, GetParam().transport,
                   [](int, Rank& rank) {
                     test::check_many_in_flight(*rank.comm, 15, rank.place());
                     test::check_split(*rank.comm, rank.place());
                   },
                   60, {0.003, 5});
}

TEST_P(DeviceRanks, SmallAndLargeSlabsGiveTheSameBits) {
  for (const std::int64_t slab_bytes : {std::int64_t{20} << 10, std::int64_t{1} << 20}) {
    run_device_ranks(
        GetParam().ranks, GetParam().transport,
        [&](int, Rank& rank) { test::check_reduce_scatter(*rank.comm, 32 << 10, rank.place()); }, 60, {},
        slab_bytes);
  }
}

/// Values of one rank on its device.
template <typename T>
class OnDevice {
 public:
  OnDevice(Device& device, const std::vector<T>& values)
      : device_(device),
        elements_(values.size()),
        buffer_(device.memory(Tier::device), static_cast<std::int64_t>(elements_ * sizeof(T)),
                Category::other, "test") {
    device.copy_from_host(device.compute_stream(), buffer_.data(), values.data(), buffer_.bytes());
    device.compute_stream().synchronize();
  }
  T* data() { return static_cast<T*>(buffer_.data()); }
  std::vector<T> read() {
    std::vector<T> values(elements_);
    device_.copy_to_host(device_.compute_stream(), values.data(), buffer_.data(), buffer_.bytes());
    device_.compute_stream().synchronize();
    return values;
  }

 private:
  Device& device_;
  std::size_t elements_;
  Buffer buffer_;
};

TEST_P(DeviceRanks, CountsAndHashesWhatTheHostCommunicatorDoes) {
  const auto calls = [](Communicator& comm, float* a, float* b) {
    const OperationLabel host{"", "agree", Traffic::control, Tier::host};
    float small[16] = {};
    std::vector<Event> events;
    events.push_back(comm.all_gather(a + comm.rank() * 10, a, 10, DataType::float32, 0, {}, label));
    events.push_back(comm.reduce_scatter(a, DataType::float16, b, DataType::float32, 11, {}, {}, label));
    events.push_back(comm.all_gather(small + comm.rank(), small, 1, DataType::float32, 0, {}, host));
    double norm = 1;
    events.push_back(comm.all_reduce(&norm, 1, DataType::float64, ReduceOperation::sum, host));
    events.push_back(comm.broadcast(b, 5, DataType::int32, comm.size() - 1, {}, label));
    events.push_back(comm.all_to_all(a, b + 64, 3, DataType::float32, {}, label));
    if (comm.size() > 1 && comm.rank() == 0)
      events.push_back(comm.send(a, 4, DataType::float32, 1, {}, label));
    if (comm.size() > 1 && comm.rank() == 1)
      events.push_back(comm.recv(a, 4, DataType::float32, 0, {}, label));
    events.push_back(comm.barrier(host));
    for (const Event& event : events) event.wait();
    comm.split(0, comm.rank())->barrier(host).wait();
  };
  run_device_ranks(GetParam().ranks, GetParam().transport, [&](int index, Rank& rank) {
    OnDevice<float> a(*rank.device, std::vector<float>(400, 1.0f)),
        b(*rank.device, std::vector<float>(400, 1.0f));
    calls(*rank.comm, a.data(), b.data());
    const auto meta = make_meta_communicator(index, GetParam().ranks, GetParam().ranks);
    calls(*meta, a.data(), b.data());
    EXPECT_EQ(rank.comm->sequence_hash(), meta->sequence_hash());
    for (const Traffic kind : {Traffic::data, Traffic::control}) {
      const auto got = rank.comm->meter().counts(kind), wanted = meta->meter().counts(kind);
      ASSERT_EQ(got.size(), wanted.size());
      for (const auto& [name, count] : wanted) {
        EXPECT_EQ(got.at(name).calls, count.calls) << name;
        EXPECT_EQ(got.at(name).elements, count.elements) << name;
        EXPECT_EQ(got.at(name).bytes, count.bytes) << name;
      }
    }
  });
}

TEST_P(DeviceRanks, RunBesideTheThreadThatIssuesThem) {
  run_device_ranks(GetParam().ranks, GetParam().transport, [](int, Rank& rank) {
    const int n = rank.comm->size();
    OnDevice<float> full(*rank.device, std::vector<float>(static_cast<std::size_t>(n * 100), 1.0f)),
        out(*rank.device, std::vector<float>(100)), gathered(*rank.device, std::vector<float>(n * 100));
    const auto gate = std::make_shared<HostEvent>();
    const std::vector<Event> ready{Event(gate)};
    const Event sum = rank.comm->reduce_scatter(full.data(), DataType::float32, out.data(), DataType::float32,
                                                100, {}, ready, label);
    const std::vector<Event> summed{sum};
    const Event gather =
        rank.comm->all_gather(out.data(), gathered.data(), 100, DataType::float32, 0, summed, label);
    // Both were issued; the host goes on, and talks to its peers meanwhile.
    double value = 1;
    rank.comm->all_reduce(&value, 1, DataType::float64, ReduceOperation::sum, label).wait();
    EXPECT_EQ(value, n);
    EXPECT_FALSE(sum.query());
    EXPECT_FALSE(gather.wait_for(0.05));
    gate->complete();
    // A stream of the device may wait as well as the host.
    const auto stream = rank.device->create_stream("other");
    stream->wait(gather);
    stream->synchronize();
    EXPECT_TRUE(gather.query());
    EXPECT_EQ(gathered.read(), std::vector<float>(n * 100, static_cast<float>(n)));
  });
}

#ifdef __SANITIZE_THREAD__
constexpr int most_ranks = 3;
#else
constexpr int most_ranks = 5;
#endif
std::vector<Case> cases() {
  std::vector<Case> result;
  for (const DeviceTransport transport : {DeviceTransport::staged, DeviceTransport::shared}) {
    for (int ranks = 1; ranks <= most_ranks; ++ranks) result.push_back({transport, ranks});
  }
  return result;
}
std::string case_name(const testing::TestParamInfo<Case>& info) {
  return std::string(name_of(info.param.transport)) + std::to_string(info.param.ranks);
}
INSTANTIATE_TEST_SUITE_P(Sizes, DeviceRanks, testing::ValuesIn(cases()), case_name);

TEST(DeviceCommunicator, SaysHowItsDataTravels) {
  const auto name = [](int size, DeviceTransport transport) {
    std::string result;
    run_device_ranks(size, transport, [&](int rank, Rank& mine) {
      if (rank == 0) result = mine.comm->backend();
    });
    return result;
  };
  EXPECT_EQ(name(2, DeviceTransport::staged), "staged over threads");
  EXPECT_EQ(name(2, DeviceTransport::shared), "shared threads");
  EXPECT_EQ(name(2, DeviceTransport::automatic), "shared threads");
  EXPECT_EQ(name(1, DeviceTransport::staged), "self");
}

TEST(DeviceCommunicator, BooksItsStagingMemory) {
  run_thread_ranks(2, [](int, const CommunicatorFactory& factory) {
    Ledger ledger;
    const auto device = make_device({});
    TrackingResource device_memory(device->memory(Tier::device), ledger),
        host_memory(device->memory(Tier::host), ledger);
    DeviceCommunicatorOptions options = device_options(DeviceTransport::staged, 60);
    options.device_memory = &device_memory;
    options.host_memory = &host_memory;
    {
      const auto comm = make_device_communicator(*device, factory(host_options(60)), options);
      EXPECT_EQ(ledger.account(Tier::host).current[Category::communication], slab);
      EXPECT_EQ(ledger.account(Tier::device).current[Category::communication], slab / 4);
    }
    EXPECT_EQ(ledger.account(Tier::host).current.total(), 0);
    EXPECT_EQ(ledger.account(Tier::device).current.total(), 0);
  });
}

// Failures. The texts are those of the host communicators.

class DeviceFailures : public testing::TestWithParam<DeviceTransport> {};

std::string failure_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const CommunicationError& error) {
    EXPECT_EQ(error.exit_status(), ExitStatus::communication);
    return error.what();
  } catch (const std::exception& error) {
    return std::string("not a CommunicationError: ") + error.what();
  }
  return "no CommunicationError";
}

/// A reduce_scatter of 100 elements a rank; its buffers live as long as the rank.
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

TEST_P(DeviceFailures, ARankThatHangsEndsAllWithinTheTimeOutAndIsNamed) {
  const Stopwatch watch;
  std::atomic<int> ended{0};
  std::mutex mutex;
  std::vector<std::string> texts;
  run_device_ranks(
      3, GetParam(),
      [&](int rank, Rank& mine) {
        Sum sum(mine);
        sum(*mine.comm).wait();
        if (rank == 1) {
          while (ended < 2) std::this_thread::yield();
          return;
        }
        const std::string text = failure_of([&] { sum(*mine.comm).wait(); });
        {
          const std::lock_guard lock(mutex);
          texts.push_back(text);
        }
        ++ended;
      },
      0.4);
  for (const std::string& text : texts) {
    EXPECT_THAT(
        text,
        HasSubstr("reduce_scatter of unit h.3 in backward: no data from rank 1 after 0.4 s (rank 1 has not "
                  "entered the operation, or hangs)"));
  }
  EXPECT_LT(watch.seconds(), 10);
}

TEST_P(DeviceFailures, APeerWhoseComputeNeverGetsThereIsATimeOutToo) {
  // Rank 1 has issued the call, but what must be done before never is.
  std::atomic<bool> ended{false};
  std::string text;
  run_device_ranks(
      2, GetParam(),
      [&](int rank, Rank& mine) {
        Sum sum(mine);
        const auto gate = std::make_shared<HostEvent>();
        const std::vector<Event> never{Event(gate)};
        const Event done = sum(*mine.comm, rank == 1 ? never : std::vector<Event>{});
        if (rank == 0) {
          text = failure_of([&] { done.wait(); });
          ended = true;
          return;
        }
        while (!ended) std::this_thread::yield();
        mine.comm->post_failure("ended by the test", 1);
        EXPECT_THAT(failure_of([&] { done.wait(); }), HasSubstr("ended by the test"));
        gate->complete();
      },
      0.3);
  EXPECT_THAT(text, HasSubstr("reduce_scatter of unit h.3 in backward: no data from rank 1 after 0.3 s"));
}

TEST_P(DeviceFailures, SlowComputeOnThisRankIsNoTimeOut) {
  run_device_ranks(
      2, GetParam(),
      [](int, Rank& mine) {
        Sum sum(mine);
        const auto gate = std::make_shared<HostEvent>();
        const std::vector<Event> ready{Event(gate)};
        const Event done = sum(*mine.comm, ready);
        EXPECT_FALSE(done.wait_for(0.9));  // longer than the time-out
        double value = 0;
        mine.comm->all_reduce(&value, 1, DataType::float64, ReduceOperation::sum, label).wait();
        gate->complete();
        done.wait();
        EXPECT_EQ(sum.out.read()[99], 2.0f);
      },
      0.6);
}

TEST_P(DeviceFailures, ARankThatThrowsEndsAllWithItsCause) {
  const Stopwatch watch;
  std::atomic<int> echoes{0};
  try {
    run_device_ranks(
        3, GetParam(),
        [&](int rank, Rank& mine) {
          Sum sum(mine);
          sum(*mine.comm).wait();
          if (rank == 2) throw NumericalError("20 steps skipped in a row");
          const std::string text = failure_of([&] { sum(*mine.comm).wait(); });
          EXPECT_THAT(
              text,
              HasSubstr("reduce_scatter of unit h.3 in backward: rank 2 failed: 20 steps skipped in a row"));
          EXPECT_THAT(failure_of([&] { sum(*mine.comm).wait(); }),
                      HasSubstr("rank 2 failed: 20 steps skipped in a row"));
          EXPECT_THAT(failure_of([&] { mine.comm->barrier(label).wait(); }),
                      HasSubstr("barrier of unit h.3 in backward: rank 2 failed: 20 steps skipped in a row"));
          ++echoes;
        },
        30);
    FAIL() << "nothing was thrown";
  } catch (const NumericalError& error) {
    EXPECT_THAT(error.what(), HasSubstr("[rank 2] 20 steps skipped in a row"));
  }
  EXPECT_EQ(echoes, 2);
  EXPECT_LT(watch.seconds(), 10);
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
          const Event done = sum(*mine.comm, ready);
          if (rank == 0)
            at_peer = failure_of([&] { done.wait(); });
          else
            done.wait();
        },
        30);
    FAIL() << "nothing was thrown";
  } catch (const NumericalError& error) {
    EXPECT_THAT(error.what(), HasSubstr("kernel failed"));
  }
  EXPECT_THAT(at_peer, HasSubstr("reduce_scatter of unit h.3 in backward: rank 1 failed: "));
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
              HasSubstr("send: rank 1 has not taken the data of this rank after 0.2 s"));
          ended = true;
        }
        while (!ended) std::this_thread::yield();
      },
      0.2);
}

TEST_P(DeviceFailures, CallsThatDoNotMatchAreFound) {
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

TEST_P(DeviceFailures, UnwindingDoesNotWaitForPeers) {
  const Stopwatch watch;
  std::string at_peer;
  try {
    run_device_ranks(
        2, GetParam(),
        [&](int rank, Rank& mine) {
          Sum sum(mine);
          const std::vector<Event> never{Event(std::make_shared<HostEvent>())};
          const Event done = sum(*mine.comm, never);
          if (rank == 1) throw NumericalError("elsewhere");
          at_peer = failure_of([&] { done.wait(); });
        },
        300);
    FAIL() << "nothing was thrown";
  } catch (const NumericalError& error) {
    EXPECT_THAT(error.what(), HasSubstr("elsewhere"));
  }
  EXPECT_THAT(at_peer, HasSubstr("rank 1 failed: elsewhere"));
  EXPECT_LT(watch.seconds(), 10);
}

INSTANTIATE_TEST_SUITE_P(Transports, DeviceFailures,
                         testing::Values(DeviceTransport::staged, DeviceTransport::shared),
                         [](const auto& info) { return std::string(name_of(info.param)); });

// Choices.

std::vector<DevicePlace> places(std::initializer_list<DevicePlace> list) {
  return list;
}
std::string refusal(DeviceTransport wanted, const std::vector<DevicePlace>& ranks, bool has_nccl = true) {
  try {
    return std::string("chosen: ") + std::string(name_of(choose_transport(wanted, ranks, has_nccl)));
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_status(), ExitStatus::configuration);
    return error.message();
  }
}

TEST(DeviceTransports, AutoTakesTheQuickestThatServesAllRanks) {
  const DevicePlace a0{1, "a", "a", "0000:3b:00.0", 0}, a1{2, "a", "a", "0000:af:00.0", 1},
      b0{3, "b", "b", "0000:3b:00.0", 0}, thread_of_a0{1, "a", "a", "0000:3b:00.0", 0},
      neighbour_of_a0{4, "a", "a", "0000:3b:00.0", 0}, cpu{5, "a", "a", "", 0};
  const auto choice = [](const std::vector<DevicePlace>& ranks, bool has_nccl = true) {
    return choose_transport(DeviceTransport::automatic, ranks, has_nccl);
  };
  EXPECT_EQ(choice({a0}), DeviceTransport::shared);
  EXPECT_EQ(choice({a0, thread_of_a0}), DeviceTransport::shared);
  EXPECT_EQ(choice({a0, a1, b0}), DeviceTransport::nccl) << "equal bus ids of two hosts are two GPUs";
  EXPECT_EQ(choice({a0, a1, b0}, false), DeviceTransport::staged);
  EXPECT_EQ(choice({a0, a1, neighbour_of_a0}), DeviceTransport::staged);
  EXPECT_EQ(choice({a0, cpu}), DeviceTransport::staged);
}

TEST(DeviceTransports, WhatCannotServeIsRefusedWithTheRanksNamed) {
  const DevicePlace a0{1, "a", "a", "0000:3b:00.0", 0}, a1{2, "a", "a", "0000:af:00.0", 1},
      again{3, "a", "a", "0000:3b:00.0", 0},
      thread_of_a1{1, "a", "a", "0000:af:00.0", 1}, cpu{1, "a", "a", "", 0};
  EXPECT_EQ(refusal(DeviceTransport::nccl, {a1, a0, again}),
            "tranche.device_transport: nccl was asked for, but ranks 1 and 2 share GPU 0 (0000:3b:00.0) of "
            "host a, and "
            "NCCL takes one rank a GPU; start one rank a GPU, or choose auto or staged (for a smoke test "
            "only, give "
            "every process an NCCL_HOSTID of its own)");
  DevicePlace named = again;
  named.nccl_host = "NCCL_HOSTID 7";
  EXPECT_EQ(refusal(DeviceTransport::nccl, {a1, a0, named}), "chosen: nccl");
  EXPECT_EQ(refusal(DeviceTransport::automatic, {a1, a0, named}), "chosen: staged");
  EXPECT_EQ(refusal(DeviceTransport::nccl, {a0}, false),
            "NCCL is not part of this build; configure with -DTRANCHE_NCCL=ON");
  EXPECT_EQ(refusal(DeviceTransport::nccl, {a0, cpu}),
            "tranche.device_transport: nccl was asked for, but the device of rank 1 is no GPU; choose device "
            "cuda, or "
            "auto");
  EXPECT_EQ(refusal(DeviceTransport::shared, {a0, a1}),
            "tranche.device_transport: shared was asked for, but ranks 0 and 1 are not threads of one "
            "process; choose "
            "auto or staged");
  EXPECT_EQ(refusal(DeviceTransport::shared, {a0, thread_of_a1}),
            "tranche.device_transport: shared was asked for, but ranks 0 and 1 are on devices 0 and 1; "
            "choose auto or "
            "nccl");
  EXPECT_EQ(refusal(DeviceTransport::automatic, {a0, thread_of_a1}, true), "chosen: nccl");
}

TEST(DeviceTransports, HaveNames) {
  for (const char* name : {"auto", "nccl", "staged", "shared"})
    EXPECT_EQ(name_of(device_transport_of(name)), name);
  EXPECT_EQ(refusal(DeviceTransport::automatic, places({{}})), "chosen: shared");
  try {
    device_transport_of("gdr");
    FAIL();
  } catch (const ConfigurationError& error) {
    EXPECT_EQ(error.message(), "'gdr' is not one of auto, nccl, staged, shared");
  }
}

TEST(DeviceTransports, OptionsThatDoNotFitAreRefused) {
  const auto device = make_device({});
  const auto message = [&](const DeviceCommunicatorOptions& options, std::unique_ptr<Communicator> host) {
    try {
      make_device_communicator(*device, std::move(host), options);
    } catch (const Error& error) {
      return error.message();
    }
    return std::string("not refused");
  };
  DeviceCommunicatorOptions options;
  options.nccl_collectives = true;
  EXPECT_EQ(message(options, make_self_communicator()),
            "tranche.collectives: nccl needs tranche.device_transport nccl, but these ranks use shared; "
            "leave the key "
            "out, or start one rank a GPU");
  run_thread_ranks(2, [&](int, const CommunicatorFactory& factory) {
    const auto own = make_device({});
    DeviceCommunicatorOptions inline_options;
    inline_options.inline_progress = true;
    try {
      make_device_communicator(*own, factory(host_options(60)), inline_options);
      ADD_FAILURE();
    } catch (const ConfigurationError& error) {
      EXPECT_THAT(error.message(),
                  HasSubstr("tranche.progress: inline moves communication only inside calls"));
    }
    DeviceCommunicatorOptions small = device_options(DeviceTransport::staged, 60, 4096);
    small.slab_bytes = 4000;
    try {
      make_device_communicator(*own, make_self_communicator(), small);
    } catch (const Error&) {
      ADD_FAILURE() << "one rank stages nothing";
    }
  });
}

}  // namespace
}  // namespace tranche
