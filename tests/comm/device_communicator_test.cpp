/// Collectives on device memory: over the cpu device, whose streams run on threads of their own, and,
/// compiled with TRANCHE_TEST_GPU, over GPUs (a GPU's ranks are threads; NCCL wants a GPU for each).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>

#include "tranche/comm/backends.h"
#include "tranche/comm/device_communicator.h"
#include "tranche/core/clock.h"
#include "tranche/core/error.h"
#include "tranche/device/cuda_probe.h"
#include "tranche/device/ledger.h"
#include "tranche/device/memory_resources.h"
#include "tranche/tests/comm/collective_suite.h"
#include "tranche/tests/comm/ordered_bracket.h"
#include "tranche/tests/core/rounds.h"

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

#ifdef TRANCHE_TEST_GPU
constexpr bool on_gpu = true;
#else
constexpr bool on_gpu = false;
#endif

/// Why a case cannot run here; empty when it can.
std::string obstacle(DeviceTransport transport, int ranks) {
  if (!on_gpu) return {};
  setenv("TRANCHE_EMULATED_GPUS", "4", 0);  // read at the first look, if the GPUs are emulated
  const CudaProbe probe = probe_cuda();
  if (probe.devices.empty()) return probe.problem;
  if (transport != DeviceTransport::nccl) return {};
  if (nccl_version() == "not compiled") return "NCCL is not part of this build";
  const auto gpus = static_cast<int>(probe.devices.size());
  if (ranks <= gpus) return {};
  return "NCCL wants a GPU for each of " + std::to_string(ranks) + " ranks, and there are " +
         std::to_string(gpus);
}

std::unique_ptr<Device> device_of(int rank, DeviceTransport transport) {
  DeviceOptions options;
  if (on_gpu) {
    options.kind = DeviceKind::cuda;
    options.index = transport == DeviceTransport::nccl ? rank : 0;
  }
  return make_device(options);
}

/// A rank: a device of its own and a communicator over it.
struct Rank {
  std::unique_ptr<Device> device;
  std::unique_ptr<Communicator> comm;
  Rank(DeviceTransport transport, std::unique_ptr<Communicator> host, double timeout = 60,
       std::int64_t slab_bytes = slab)
      : device(device_of(host->rank(), transport)),
        comm(make_device_communicator(*device, std::move(host),
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
        if (!on_gpu) return body(rank, mine);
        try {
          body(rank, mine);
        } catch (const std::exception& error) {
          // As programs do, before anything is unwound: freeing pinned memory waits for all streams of a GPU,
          // those of the peers too, which wait for this rank.
          const auto* known = dynamic_cast<const Error*>(&error);
          mine.comm->post_failure(known != nullptr ? known->message() : error.what(), 2);
          throw;
        }
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

class DeviceRanks : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (const std::string why = obstacle(GetParam().transport, GetParam().ranks); !why.empty())
      GTEST_SKIP() << why;
  }
};

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

TEST_P(DeviceRanks, ReadPeersWhenTheyAreReadyAndLetGoWhenAllHaveRead) {
  run_device_ranks(GetParam().ranks, GetParam().transport, [](int index, Rank& rank) {
    const int n = rank.comm->size();
    const std::int64_t count = 30000;
    const auto stream = rank.device->create_stream("writer");
    const std::vector<float> values(static_cast<std::size_t>(n * count), static_cast<float>(index + 1));
    OnDevice<float> full(*rank.device, std::vector<float>(values.size(), -1.0f)),
        sum(*rank.device, std::vector<float>(count)),
        gathered(*rank.device, std::vector<float>(values.size()));
    // Each rank's data come later than those of the rank before.
    stream->enqueue("late", [index] { std::this_thread::sleep_for(std::chrono::milliseconds(15 * index)); });
    rank.device->copy_from_host(*stream, full.data(), values.data(), n * count * 4);
    const std::vector<Event> written{stream->record()};
    const Event summed = rank.comm->reduce_scatter(full.data(), DataType::float32, sum.data(),
                                                   DataType::float32, count, {}, written, label);
    const Event gather =
        rank.comm->all_gather(full.data(), gathered.data(), count, DataType::float32, 0, written, label);
    // And is overwritten as soon as the calls are done.
    stream->wait(summed);
    stream->wait(gather);
    rank.device->fill_bytes(*stream, full.data(), 0xff, n * count * 4);
    stream->synchronize();
    EXPECT_EQ(sum.read(), std::vector<float>(count, static_cast<float>(n * (n + 1) / 2)));
    std::vector<float> wanted;
    for (int s = 0; s < n; ++s) wanted.insert(wanted.end(), count, static_cast<float>(s + 1));
    EXPECT_EQ(gathered.read(), wanted);
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

#if defined(__SANITIZE_THREAD__)
constexpr int most_ranks = 3;
#else
constexpr int most_ranks = on_gpu ? 4 : test::sanitized ? 3 : 5;
#endif
std::vector<DeviceTransport> transports() {
  if (!on_gpu) return {DeviceTransport::staged, DeviceTransport::shared};
  return {DeviceTransport::staged, DeviceTransport::shared, DeviceTransport::nccl};
}
std::vector<Case> cases() {
  std::vector<Case> result;
  for (const DeviceTransport transport : transports()) {
    for (int ranks = 1; ranks <= most_ranks; ++ranks) result.push_back({transport, ranks});
  }
  return result;
}
std::string case_name(const testing::TestParamInfo<Case>& info) {
  return std::string(name_of(info.param.transport)) + std::to_string(info.param.ranks);
}
INSTANTIATE_TEST_SUITE_P(Sizes, DeviceRanks, testing::ValuesIn(cases()), case_name);

TEST(DeviceCommunicator, SaysHowItsDataTravels) {
  if (const std::string why = obstacle(DeviceTransport::staged, 2); !why.empty()) GTEST_SKIP() << why;
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
  if (const std::string why = obstacle(DeviceTransport::staged, 2); !why.empty()) GTEST_SKIP() << why;
  run_thread_ranks(2, [](int, const CommunicatorFactory& factory) {
    Ledger ledger;
    const auto device = device_of(0, DeviceTransport::staged);
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

class DeviceFailures : public testing::TestWithParam<DeviceTransport> {
 protected:
  void SetUp() override {
    if (const std::string why = obstacle(GetParam(), 3); !why.empty()) GTEST_SKIP() << why;
  }
};

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
    if (GetParam() == DeviceTransport::nccl) {  // does not tell who is missing
      EXPECT_THAT(text, HasSubstr("] reduce_scatter of unit h.3 in backward: not done after 0.4 s"));
      continue;
    }
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
  EXPECT_THAT(text,
              HasSubstr(GetParam() == DeviceTransport::nccl
                            ? "reduce_scatter of unit h.3 in backward: not done after 0.3 s"
                            : "reduce_scatter of unit h.3 in backward: no data from rank 1 after 0.3 s"));
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
          const auto call = [&] { sum(*mine.comm, ready).wait(); };
          if (rank == 0) {
            at_peer = failure_of([&] {
              call();
              // NCCL carries what the failed work left: its rank's cause ends the next call.
              if (GetParam() == DeviceTransport::nccl) mine.comm->barrier(label).wait();
            });
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
              HasSubstr("send: rank 1 has not taken the data of this rank after 0.2 s"));
          ended = true;
        }
        while (!ended) std::this_thread::yield();
      },
      0.2);
}

TEST_P(DeviceFailures, CallsThatDoNotMatchAreFound) {
  // NCCL cannot tell: there the sequence hash, compared at every step's end, has to.
  if (GetParam() == DeviceTransport::nccl) return;
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
          const auto issue = [&] { return sum(*mine.comm, never); };
          if (rank == 1) {
            const Event pending = issue();
            throw NumericalError("elsewhere");
          }
          at_peer = failure_of([&] { issue().wait(); });
        },
        300);
    FAIL() << "nothing was thrown";
  } catch (const NumericalError& error) {
    EXPECT_THAT(error.what(), HasSubstr("elsewhere"));
  }
  EXPECT_THAT(at_peer, HasSubstr("rank 1 failed: elsewhere"));
  EXPECT_LT(watch.seconds(), 10);
}

#ifdef TRANCHE_TEST_GPU
TEST(NcclReductions, AreWhatWasAskedFor) {
  // Small whole numbers: sums are exact in every order, so that NCCL's must be equal too.
  if (const std::string why = obstacle(DeviceTransport::nccl, 1); !why.empty()) GTEST_SKIP() << why;
  for (const int size : {1, 2, 3, 4}) {
    if (!obstacle(DeviceTransport::nccl, size).empty()) continue;
    run_thread_ranks(size, [&](int rank, const CommunicatorFactory& factory) {
      const auto device = device_of(rank, DeviceTransport::nccl);
      DeviceCommunicatorOptions options = device_options(DeviceTransport::nccl, 60);
      options.library_collectives = true;
      const auto comm = make_device_communicator(*device, factory(host_options(60)), options);
      EXPECT_EQ(comm->backend(), "nccl over threads");
      for (const std::int64_t count : {1, 257, 20011}) {  // the last is beyond the slab
        for (const bool accumulate : {false, true}) {
          for (const DataType output : {DataType::float32, DataType::bfloat16}) {
            std::vector<bfloat16> values(static_cast<std::size_t>(size * count));
            for (std::size_t i = 0; i < values.size(); ++i) {
              values[i] = from_float<bfloat16>(static_cast<float>((static_cast<int>(i) + rank) % 7 - 3));
            }
            OnDevice<bfloat16> full(*device, values);
            OnDevice<bfloat16> narrow(*device, std::vector<bfloat16>(count, from_float<bfloat16>(2)));
            OnDevice<float> wide(*device, std::vector<float>(count, 2));
            void* out = output == DataType::float32 ? static_cast<void*>(wide.data()) : narrow.data();
            comm->reduce_scatter(full.data(), DataType::bfloat16, out, output, count, {1, accumulate, 0}, {},
                                 label)
                .wait();
            const auto got_wide = wide.read();
            const auto got_narrow = narrow.read();
            for (std::int64_t i = 0; i < count; ++i) {
              int sum = accumulate ? 2 : 0;
              for (int s = 0; s < size; ++s) sum += static_cast<int>((rank * count + i + s) % 7) - 3;
              const auto at = static_cast<std::size_t>(i);
              const float got = output == DataType::float32 ? got_wide[at] : to_float(got_narrow[at]);
              ASSERT_EQ(got, static_cast<float>(sum))
                  << "n " << size << " count " << count << " element " << i;
            }
          }
        }
      }
    });
  }
}
#endif

INSTANTIATE_TEST_SUITE_P(Transports, DeviceFailures, testing::ValuesIn(transports()),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace tranche
