/// Collectives on device memory: on the cpu device, whose streams have threads of their own, and, compiled
/// with TRANCHE_TEST_GPU, on GPUs (a GPU's ranks are threads; NCCL needs a GPU for each).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>

#include "comm/nccl/nccl_exchange.h"
#include "core/clock.h"
#include "tests/comm/collective_suite.h"
#include "tests/comm/device_ranks.h"
#include "tests/comm/reduction_order.h"
#include "tests/core/error_text.h"
#include "tests/core/rounds.h"
#include "tranche/core/error.h"
#include "tranche/device/ledger.h"
#include "tranche/device/memory_resources.h"

namespace tranche {
namespace {

using test::device_of;
using test::device_options;
using test::host_options;
using test::label;
using test::obstacle;
using test::on_gpu;
using test::OnDevice;
using test::Rank;
using test::run_device_ranks;
using test::small_staging;
using test::transports;

struct Case {
  comm::DeviceTransport transport;
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
                   [](int, Rank& rank) { test::check_everything(*rank.comm, small_staging, rank.place()); });
}

TEST_P(DeviceRanks, DelaysChangeNoBit) {
  run_device_ranks(GetParam().ranks, GetParam().transport,
                   [](int, Rank& rank) {
                     test::check_many_in_flight(*rank.comm, 15, rank.place());
                     test::check_split(*rank.comm, rank.place());
                   },
                   60, {0.003, 5});
}

TEST_P(DeviceRanks, SmallAndLargeStagingBuffersGiveTheSameBits) {
  for (const std::int64_t staging_bytes : {std::int64_t{20} << 10, std::int64_t{1} << 20}) {
    run_device_ranks(
        GetParam().ranks, GetParam().transport,
        [&](int, Rank& rank) { test::check_reduce_scatter(*rank.comm, 32 << 10, rank.place()); }, 60, {},
        staging_bytes);
  }
}

TEST_P(DeviceRanks, PartsOfEverySizePassTheLeastStagingBuffer) {
  // The staging buffer is so small that the parts are sent in chunks of a few 8-byte elements.
  const std::int64_t least = 64 * 8 * (GetParam().ranks + 1) * 4;
  run_device_ranks(
      GetParam().ranks, GetParam().transport,
      [&](int, Rank& rank) { test::check_all_to_all_v(*rank.comm, least, rank.place()); }, 60, {}, least);
}

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
    std::vector<RankElements> sends, receives;  // a rank sends each peer as many elements as its own number
    for (std::int64_t r = 0; r < comm.size(); ++r) {
      sends.push_back({9 * r, comm.rank()});
      receives.push_back({100 + 9 * r, r});
    }
    events.push_back(comm.all_to_all_v(a, sends, b, receives, DataType::float32, {}, label));
    // A message does not wait for earlier collectives, which use the same memory here.
    if (comm.size() > 1 && comm.rank() == 0)
      events.push_back(comm.send(a, 4, DataType::float32, 1, events, label));
    if (comm.size() > 1 && comm.rank() == 1)
      events.push_back(comm.recv(a, 4, DataType::float32, 0, events, label));
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

TEST(StagedRanks, FoldIntoFp32Alone) {
  if (const std::string why = obstacle(comm::DeviceTransport::staged, 2); !why.empty()) GTEST_SKIP() << why;
  run_device_ranks(2, comm::DeviceTransport::staged, [](int, Rank& rank) {
    OnDevice<bfloat16> full(*rank.device, std::vector<bfloat16>(200)),
        out(*rank.device, std::vector<bfloat16>(100));
    EXPECT_THAT(test::message_of<InvalidArgument>([&] {
                  rank.comm->reduce_scatter(full.data(), DataType::bfloat16, out.data(), DataType::bfloat16,
                                            100, {0, true, 0}, {}, label);
                }),
                ::testing::HasSubstr("a fold through host memory is added up in fp32, not in bf16"));
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
        gathered(*rank.device, std::vector<float>(values.size())),
        parts(*rank.device, std::vector<float>(values.size(), -2.0f));
    // Each rank's data are ready later than those of the previous rank.
    stream->enqueue("late", [index] { std::this_thread::sleep_for(std::chrono::milliseconds(15 * index)); });
    rank.device->copy_from_host(*stream, full.data(), values.data(), n * count * 4);
    const std::vector<Event> written{stream->record()};
    const Event summed = rank.comm->reduce_scatter(full.data(), DataType::float32, sum.data(),
                                                   DataType::float32, count, {}, written, label);
    const Event gather =
        rank.comm->all_gather(full.data(), gathered.data(), count, DataType::float32, 0, written, label);
    // Each rank sends one element less to each peer than the next rank does.
    std::vector<RankElements> sends, receives;
    for (std::int64_t r = 0; r < n; ++r) {
      sends.push_back({r * count, count - n + index});
      receives.push_back({r * count, count - n + r});
    }
    const Event exchanged = rank.comm->all_to_all_v(full.data(), sends, parts.data(), receives,
                                                    DataType::float32, written, label);
    // The memory is overwritten as soon as the calls are complete.
    stream->wait(summed);
    stream->wait(gather);
    stream->wait(exchanged);
    rank.device->fill_bytes(*stream, full.data(), 0xff, n * count * 4);
    stream->synchronize();
    EXPECT_EQ(sum.read(), std::vector<float>(count, static_cast<float>(n * (n + 1) / 2)));
    std::vector<float> wanted;
    for (int s = 0; s < n; ++s) wanted.insert(wanted.end(), count, static_cast<float>(s + 1));
    EXPECT_EQ(gathered.read(), wanted);
    for (std::int64_t r = 0; r < n; ++r) {
      std::fill_n(wanted.begin() + (r + 1) * count - n + r, n - r, -2.0f);
    }
    EXPECT_EQ(parts.read(), wanted);
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
    // Both were issued; meanwhile the host continues and communicates with its peers.
    double value = 1;
    rank.comm->all_reduce(&value, 1, DataType::float64, ReduceOperation::sum, label).wait();
    EXPECT_EQ(value, n);
    EXPECT_FALSE(sum.query());
    EXPECT_FALSE(gather.wait_for(0.05));
    gate->complete();
    // A stream of the device can wait as well as the host can.
    const auto stream = rank.device->create_stream("other");
    stream->wait(gather);
    stream->synchronize();
    EXPECT_TRUE(gather.query());
    EXPECT_EQ(gathered.read(), std::vector<float>(n * 100, static_cast<float>(n)));
  });
}

// Freeing pinned memory waits for all work of the GPU. That includes a recv of another communicator whose
// peer waits for the message that is being issued.
TEST_P(DeviceRanks, MessagesPassWhileARecvElsewhereIsPending) {
  if (GetParam().ranks < 2) return;
  if (GetParam().transport == comm::DeviceTransport::shared) return;  // its recv waits on the host
  constexpr std::int64_t count = 50001, rounds = 3;  // 200 kB: several parts, the last of an odd size
  run_device_ranks(
      GetParam().ranks, GetParam().transport,
      [](int index, Rank& rank) {
        const auto beside = rank.comm->split(0, index);
        const auto values = [](int sender, std::int64_t round) {
          std::vector<float> made(count);
          for (std::size_t i = 0; i < made.size(); ++i)
            made[i] = static_cast<float>(i) + static_cast<float>(1000 * sender + round);
          return made;
        };
        OnDevice<float> answer(*rank.device, values(index, 0));
        std::vector<std::unique_ptr<OnDevice<float>>> messages;
        for (std::int64_t round = 0; round < rounds; ++round)
          messages.push_back(std::make_unique<OnDevice<float>>(*rank.device, values(index, round)));
        const auto pass = [&](std::int64_t round) {
          float* const data = messages[static_cast<std::size_t>(round)]->data();
          return index == 0 ? beside->send(data, count, DataType::float32, 1, {}, label)
                            : beside->recv(data, count, DataType::float32, 0, {}, label);
        };
        if (index == 0) {
          pass(0).wait();
          const Event answered = rank.comm->recv(answer.data(), count, DataType::float32, 1, {}, label);
          EXPECT_FALSE(answered.wait_for(0.02));
          for (std::int64_t round = 1; round < rounds; ++round) pass(round).wait();
          answered.wait();
          EXPECT_EQ(answer.read(), values(1, 0));
        } else if (index == 1) {
          for (std::int64_t round = 0; round < rounds; ++round) pass(round).wait();
          rank.comm->send(answer.data(), count, DataType::float32, 0, {}, label).wait();
          for (std::int64_t round = 0; round < rounds; ++round)
            EXPECT_EQ(messages[static_cast<std::size_t>(round)]->read(), values(0, round));
        }
      },
      60);
}

// Messages along a line: each rank has receives from both neighbours pending when it sends to them, and its
// first message has no receive yet.
TEST_P(DeviceRanks, NeighboursOfALinePassMessagesBothWaysAtOnce) {
  if (GetParam().ranks < 2) return;
  constexpr std::int64_t count = 150001;  // 600 kB: several parts through host memory
  run_device_ranks(GetParam().ranks, GetParam().transport, [](int index, Rank& rank) {
    std::vector<int> all(static_cast<std::size_t>(rank.comm->size()));
    std::iota(all.begin(), all.end(), 0);
    const auto line = rank.comm->line(all);
    const auto values = [](int sender, int round) {
      std::vector<float> made(count);
      for (std::size_t i = 0; i < made.size(); ++i)
        made[i] = static_cast<float>(i % 1000) + static_cast<float>(1000 * sender + 10000 * round);
      return made;
    };
    const bool receives_first = GetParam().transport != comm::DeviceTransport::shared;
    for (int round = 0; round < 3; ++round) {
      OnDevice<float> mine(*rank.device, values(index, round));
      std::vector<int> neighbours;
      if (index > 0) neighbours.push_back(index - 1);
      if (index + 1 < line->size()) neighbours.push_back(index + 1);
      std::vector<std::unique_ptr<OnDevice<float>>> got;
      std::vector<Event> events;
      const auto send = [&] {
        for (const int peer : neighbours)
          events.push_back(line->send(mine.data(), count, DataType::float32, peer, {}, label));
      };
      // With shared a recv waits on the host until the peer has sent.
      if (!receives_first) send();
      for (const int peer : neighbours) {
        got.push_back(std::make_unique<OnDevice<float>>(*rank.device, std::vector<float>(count)));
        events.push_back(line->recv(got.back()->data(), count, DataType::float32, peer, {}, label));
      }
      if (receives_first) send();
      for (const Event& event : events) event.wait();
      for (std::size_t i = 0; i < neighbours.size(); ++i)
        EXPECT_EQ(got[i]->read(), values(neighbours[i], round)) << "round " << round;
    }
    line->barrier({"", "end", Traffic::control, Tier::host}).wait();
  });
}

// Each rank sends to the next and receives from the previous one, and then in the other direction.
TEST_P(DeviceRanks, JoinedEndsOfALineAreNeighbours) {
  if (GetParam().ranks < 3) return;
  run_device_ranks(GetParam().ranks, GetParam().transport, [](int index, Rank& rank) {
    std::vector<int> all(static_cast<std::size_t>(rank.comm->size()));
    std::iota(all.begin(), all.end(), 0);
    const auto line = rank.comm->line(all);
    for (int time = 0; time < 2; ++time) line->join_ends();
    OnDevice<float> mine(*rank.device, {static_cast<float>(index), 1});
    for (const int step : {1, line->size() - 1}) {
      OnDevice<float> got(*rank.device, {-1, -1});
      const int to = (index + step) % line->size(), from = (index + line->size() - step) % line->size();
      const Event sent = line->send(mine.data(), 2, DataType::float32, to, {}, label);
      line->recv(got.data(), 2, DataType::float32, from, {}, label).wait();
      sent.wait();
      EXPECT_EQ(got.read(), (std::vector<float>{static_cast<float>(from), 1}));
    }
    if (line->size() > 3 && index == 0) {
      EXPECT_EQ(test::message_of<InvalidArgument>(
                    [&] { line->send(mine.data(), 1, DataType::float32, 2, {}, label); }),
                "send of unit h.3 in backward: rank 2 is no neighbour of rank 0 on a line of " +
                    std::to_string(line->size()) + " ranks");
    }
    EXPECT_EQ(test::message_of<LogicError>([&] { rank.comm->join_ends(); }),
              "join_ends() of a group that is no line");
    line->barrier({"", "end", Traffic::control, Tier::host}).wait();
  });
}

TEST_P(DeviceRanks, ALineHasMessagesBetweenNeighboursAlone) {
  if (GetParam().ranks != 3) return;
  run_device_ranks(3, GetParam().transport, [](int index, Rank& rank) {
    const std::vector<int> all{0, 1, 2};
    const auto line = rank.comm->line(all);
    OnDevice<float> value(*rank.device, {1, 2, 3});
    if (index == 0) {
      EXPECT_EQ(test::message_of<InvalidArgument>(
                    [&] { line->send(value.data(), 1, DataType::float32, 2, {}, label); }),
                "send of unit h.3 in backward: rank 2 is no neighbour of rank 0 on a line of 3 ranks");
    }
    EXPECT_EQ(
        test::message_of<LogicError>([&] {
          line->all_gather(value.data() + index, value.data(), 1, DataType::float32, 0, {}, label);
        }),
        "all_gather of unit h.3 in backward of device memory on a line of ranks, which has messages alone");
    std::int64_t sum = index;
    line->all_reduce(&sum, 1, DataType::int64, ReduceOperation::sum,
                     {"", "agree", Traffic::control, Tier::host})
        .wait();
    EXPECT_EQ(sum, 3);
  });
}

#if defined(__SANITIZE_THREAD__)
constexpr int most_ranks = 3;
#else
constexpr int most_ranks = on_gpu ? 4 : test::sanitized ? 3 : 5;  // four ranks share a GPU's launch queues
#endif
std::vector<Case> cases() {
  std::vector<Case> result;
  for (const comm::DeviceTransport transport : transports()) {
    const int most = on_gpu && transport == comm::DeviceTransport::nccl ? 5 : most_ranks;
    for (int ranks = 1; ranks <= most; ++ranks) {
      const int point = ranks + static_cast<int>(transport);
      if (ranks < 3 || !test::sanitized || test::swept(point, 3)) result.push_back({transport, ranks});
    }
  }
  return result;
}
std::string case_name(const testing::TestParamInfo<Case>& info) {
  return std::string(name_of(info.param.transport)) + std::to_string(info.param.ranks);
}
INSTANTIATE_TEST_SUITE_P(Sizes, DeviceRanks, testing::ValuesIn(cases()), case_name);

#ifdef TRANCHE_TEST_GPU
TEST(DeviceCommunicator, ServesADeviceWhoseIndexIsBeyondTheGpus) {
  if (const std::string why = obstacle(comm::DeviceTransport::nccl, 1); !why.empty()) GTEST_SKIP() << why;
  DeviceOptions options;
  options.kind = DeviceKind::cuda;
  options.index = static_cast<int>(detail::probe_cuda().devices.size()) + 1;
  const auto device = make_device(options);
  EXPECT_NE(comm::nccl_gpu_of(*device), "");
  options.index %= static_cast<int>(detail::probe_cuda().devices.size());
  EXPECT_EQ(comm::nccl_gpu_of(*device), comm::nccl_gpu_of(*make_device(options)));
  const auto comm = comm::make_device_communicator(*device, make_self_communicator(),
                                                   device_options(comm::DeviceTransport::nccl, 60));
  OnDevice<float> from(*device, {1, 2, 3}), to(*device, {0, 0, 0});
  comm->all_gather(from.data(), to.data(), 3, DataType::float32, 0, {}, label).wait();
  EXPECT_EQ(to.read(), (std::vector<float>{1, 2, 3}));
}
#endif

TEST(DeviceCommunicator, SaysHowItsDataTravels) {
  if (const std::string why = obstacle(comm::DeviceTransport::staged, 2); !why.empty()) GTEST_SKIP() << why;
  const auto name = [](int size, comm::DeviceTransport transport) {
    std::string result;
    run_device_ranks(size, transport, [&](int rank, Rank& mine) {
      if (rank == 0) result = mine.comm->backend();
    });
    return result;
  };
  EXPECT_EQ(name(2, comm::DeviceTransport::staged), "staged over threads");
  EXPECT_EQ(name(2, comm::DeviceTransport::shared), "shared threads");
  EXPECT_EQ(name(2, comm::DeviceTransport::automatic), "shared threads");
  EXPECT_EQ(name(1, comm::DeviceTransport::staged), "self");
}

TEST(DeviceCommunicator, TracksItsStagingMemory) {
  if (const std::string why = obstacle(comm::DeviceTransport::staged, 2); !why.empty()) GTEST_SKIP() << why;
  run_thread_ranks(2, [](int, const CommunicatorFactory& factory) {
    Ledger ledger;
    const auto device = device_of(0, comm::DeviceTransport::staged);
    TrackingResource device_memory(device->memory(Tier::device), ledger),
        host_memory(device->memory(Tier::host), ledger);
    comm::DeviceCommunicatorOptions options = device_options(comm::DeviceTransport::staged, 60);
    options.device_memory = &device_memory;
    options.host_memory = &host_memory;
    {
      const auto comm = comm::make_device_communicator(*device, factory(host_options(60)), options);
      EXPECT_EQ(ledger.account(Tier::host).current[Category::communication], small_staging);
      EXPECT_EQ(ledger.account(Tier::device).current[Category::communication], small_staging / 4);
    }
    EXPECT_EQ(ledger.account(Tier::host).current.total(), 0);
    EXPECT_EQ(ledger.account(Tier::device).current.total(), 0);
  });
}

#ifdef TRANCHE_TEST_GPU
TEST(NcclReductions, AreWhatWasAskedFor) {
  // Values are small integers, whose sums are exact in every order, so NCCL's must be equal as well.
  if (const std::string why = obstacle(comm::DeviceTransport::nccl, 1); !why.empty()) GTEST_SKIP() << why;
  for (const int size : {1, 2, 3, 4}) {
    if (!obstacle(comm::DeviceTransport::nccl, size).empty()) continue;
    run_thread_ranks(size, [&](int rank, const CommunicatorFactory& factory) {
      const auto device = device_of(rank, comm::DeviceTransport::nccl);
      comm::DeviceCommunicatorOptions options = device_options(comm::DeviceTransport::nccl, 60);
      options.library_collectives = true;
      const auto comm = comm::make_device_communicator(*device, factory(host_options(60)), options);
      EXPECT_EQ(comm->backend(), "nccl over threads");
      for (const std::int64_t count : {1, 257, 20011}) {  // the last is beyond the staging buffer
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

}  // namespace
}  // namespace tranche
