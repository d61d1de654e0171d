/// The engine's promises beyond the sums: overlap with compute, memory, meter, hash, traces, the meta
/// backend.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <latch>
#include <set>

#include "tranche/comm/backends.h"
#include "tranche/core/error.h"
#include "tranche/core/trace.h"
#include "tranche/device/ledger.h"
#include "tranche/device/memory_resources.h"

namespace tranche {
namespace {

const OperationLabel label{"h.3", "backward"};

CommunicatorOptions options() {
  CommunicatorOptions result;
  result.timeout_seconds = 60;
  result.staging_bytes = 64 << 10;
  return result;
}

TEST(Engine, CollectivesMoveWhileTheIssuingThreadsCompute) {
  // No issuing thread waits or calls anything after the issue until every rank has seen its sum arrive: only
  // a thread of the communicator's own can have moved it.
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

TEST(Engine, AReductionThatWaitsForALateRankLeavesASlotToLaterOnes) {
  // Rank 0 is ready for the first sum at once and so holds a slot; rank 1 is late with it. The second sum,
  // larger than the staging buffer, must still come through on both.
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
    EXPECT_FALSE(late.query());  // before the other rank may open the gate
    second_done.arrive_and_wait();
    gate->complete();
    late.wait();
    EXPECT_EQ(first, second);
  });
}

TEST(Engine, TheStagingBufferIsOneAllocationMadeAtConstruction) {
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

TEST(Engine, OneRankTakesNoStagingBuffer) {
  Ledger ledger;
  const auto host = make_host_resource(Tier::device);
  TrackingResource memory(*host, ledger);
  CommunicatorOptions with_memory = options();
  with_memory.memory = &memory;
  const auto self = make_self_communicator(with_memory);
  const auto meta = make_meta_communicator(0, 1, 1, with_memory);
  EXPECT_EQ(memory.calls(), 0);
}

TEST(Engine, EveryOperationLeavesASpan) {
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

TEST(Engine, LocalSizeCanBePretended) {
  run_thread_ranks(5, [](int rank, const CommunicatorFactory& factory) {
    CommunicatorOptions pairs = options();
    pairs.local_size = 2;
    const auto comm = factory(pairs);
    EXPECT_EQ(comm->local_size(), rank == 4 ? 1 : 2);
    EXPECT_EQ(comm->local_rank(), rank % 2);
    // 0, 2 and 4 are on three nodes.
    const auto apart = comm->split(rank % 2, 0);
    EXPECT_EQ(apart->local_size(), 1);
    EXPECT_EQ(apart->local_rank(), 0);
    const auto meta = make_meta_communicator(rank, 5, 2);
    EXPECT_EQ(meta->local_size(), comm->local_size());
    EXPECT_EQ(meta->local_rank(), comm->local_rank());
  });
}

/// One call of every kind.
void call_everything(Communicator& comm, std::vector<float>& a, std::vector<float>& b) {
  const int n = comm.size();
  const std::vector<Event> none;
  std::vector<Event> events;
  events.push_back(
      comm.all_gather(a.data() + comm.rank() * 10, a.data(), 10, DataType::float32, 0, none, label));
  events.back().wait();
  events.push_back(
      comm.reduce_scatter(a.data(), DataType::float16, b.data(), DataType::float32, 11, {}, none, label));
  events.push_back(comm.all_reduce(b.data() + 20, 2, DataType::float64, ReduceOperation::sum, {"", "norm"}));
  events.push_back(comm.broadcast(b.data() + 40, 5, DataType::int32, n - 1, none, label));
  for (const Event& event : events) event.wait();
  comm.all_to_all(a.data(), b.data(), 3, DataType::float32, none, {"", "", Traffic::control}).wait();
  if (n > 1 && comm.rank() == 0) comm.send(a.data(), 4, DataType::float32, 1, none, label).wait();
  if (n > 1 && comm.rank() == 1) comm.recv(a.data(), 4, DataType::float32, 0, none, label).wait();
  comm.barrier(label).wait();
  comm.split(0, 0)->barrier(label).wait();
}

TEST(Meta, CountsBooksAndHashesWhatTheRealOnesDo) {
  for (const int size : {1, 2, 5}) {
    run_thread_ranks(size, [size](int rank, const CommunicatorFactory& factory) {
      Ledger real_ledger, meta_ledger;
      const auto host = make_host_resource(Tier::device), nowhere = make_meta_resource(Tier::device);
      TrackingResource real_memory(*host, real_ledger), meta_memory(*nowhere, meta_ledger);
      CommunicatorOptions real_options = options(), meta_options = options();
      real_options.memory = &real_memory;
      meta_options.memory = &meta_memory;
      const auto real = factory(real_options);
      const auto meta = make_meta_communicator(rank, size, size, meta_options);
      EXPECT_EQ(meta->backend(), "meta");
      std::vector<float> a(400, 1.0f), b(400, 1.0f);
      call_everything(*real, a, b);
      a.assign(400, 7.0f);
      b = a;
      call_everything(*meta, a, b);
      EXPECT_EQ(a, std::vector<float>(400, 7.0f)) << "meta touches nothing";
      EXPECT_EQ(b, std::vector<float>(400, 7.0f)) << "meta touches nothing";
      EXPECT_EQ(meta->sequence_hash(), real->sequence_hash());
      for (const Traffic kind : {Traffic::data, Traffic::control}) {
        const auto got = meta->meter().counts(kind), wanted = real->meter().counts(kind);
        ASSERT_EQ(got.size(), wanted.size());
        for (const auto& [name, count] : wanted) {
          EXPECT_EQ(got.at(name).calls, count.calls) << name;
          EXPECT_EQ(got.at(name).elements, count.elements) << name;
          EXPECT_EQ(got.at(name).bytes, count.bytes) << name;
        }
      }
      EXPECT_EQ(meta_ledger.account(Tier::device).current[Category::communication],
                real_ledger.account(Tier::device).current[Category::communication]);
      EXPECT_EQ(meta->split(-1, 0), nullptr);
    });
  }
}

TEST(Meta, CountsSumsBetweenNodesAsFp32) {
  // Nodes of two ranks, of which the last has one, and groups that fit them, or do not.
  for (const int group : {1, 2, 3, 5}) {
    std::atomic<std::int64_t> bytes{0};
    run_thread_ranks(5, [&](int rank, const CommunicatorFactory& factory) {
      CommunicatorOptions chosen = options();
      chosen.local_size = 2;
      chosen.collectives = NodeCollectives::shared;
      const auto real = factory(chosen);
      const auto meta = make_meta_communicator(rank, 5, 2, chosen);
      std::vector<bfloat16> full(5 * 700);
      std::vector<float> out(700);
      for (Communicator* comm : {real.get(), meta.get()}) {
        comm->reduce_scatter(full.data(), DataType::bfloat16, out.data(), DataType::float32, 700,
                             {group, false, 0}, {}, label)
            .wait();
      }
      const auto got = real->meter().total(Traffic::data), planned = meta->meter().total(Traffic::data);
      EXPECT_EQ(got.elements, 4 * 700);
      EXPECT_EQ(got.bytes, planned.bytes);
      bytes += got.bytes;
    });
    // Groups of two: nodes 0 and 1 send a sum for each of the three ranks elsewhere. Other groups lie on
    // several nodes, or are one rank.
    const std::int64_t sums = group == 2 ? 6 : 0;
    EXPECT_EQ(bytes, (20 - sums) * 700 * 2 + sums * 700 * 4) << group;
  }
}

TEST(SequenceHash, SeesOperationCountTypeUnitAndPhase) {
  float values[8] = {};
  const auto after = [&](const std::function<void(Communicator&)>& call) {
    const auto comm = make_self_communicator();
    call(*comm);
    return comm->sequence_hash();
  };
  const auto gather = [&](std::int64_t count, DataType dtype, OperationLabel label) {
    return after(
        [&](Communicator& comm) { comm.all_gather(values, values, count, dtype, 0, {}, label).wait(); });
  };
  std::set<std::uint64_t> hashes{
      after([](Communicator&) {}),
      gather(1, DataType::float32, {"a", "b"}),
      gather(2, DataType::float32, {"a", "b"}),
      gather(1, DataType::bfloat16, {"a", "b"}),
      gather(1, DataType::float32, {"ab", ""}),
      gather(1, DataType::float32, {"", "ab"}),
      after([&](Communicator& comm) {
        comm.broadcast(values, 1, DataType::float32, 0, {}, {"a", "b"}).wait();
      }),
  };
  EXPECT_EQ(hashes.size(), 7u);
  EXPECT_EQ(gather(1, DataType::float32, {"a", "b"}), gather(1, DataType::float32, {"a", "b"}));
}

TEST(ByteMeter, AddsUpAndResets) {
  ByteMeter meter;
  meter.add("all_gather", Traffic::data, 10, 20);
  meter.add("all_gather", Traffic::data, 1, 2);
  meter.add("barrier", Traffic::control, 0, 0);
  EXPECT_EQ(meter.counts(Traffic::data).at("all_gather").calls, 2);
  EXPECT_EQ(meter.total(Traffic::data).elements, 11);
  EXPECT_EQ(meter.total(Traffic::data).bytes, 22);
  EXPECT_EQ(meter.total(Traffic::control).calls, 1);
  meter.reset();
  EXPECT_TRUE(meter.counts(Traffic::data).empty());
}

#ifdef TRANCHE_TEST_WITHOUT_MPI
TEST(MpiStub, NamesTheOptionThatAddsMpi) {
  try {
    make_mpi_communicator();
    FAIL() << "nothing was thrown";
  } catch (const NotCompiled& error) {
    EXPECT_EQ(error.message(), "Open MPI is not part of this build; configure with -DTRANCHE_MPI=ON");
  }
  EXPECT_EQ(mpi_version(), "not compiled");
}
#endif

}  // namespace
}  // namespace tranche
