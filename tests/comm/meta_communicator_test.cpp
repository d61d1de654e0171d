#include <gtest/gtest.h>

#include <atomic>
#include <vector>

#include "tranche/comm/backends.h"
#include "tranche/device/ledger.h"
#include "tranche/device/memory_resources.h"

namespace tranche {
namespace {

const OperationLabel call_label{"h.3", "backward"};

CommunicatorOptions small_options() {
  CommunicatorOptions result;
  result.timeout_seconds = 60;
  result.staging_bytes = 64 << 10;
  return result;
}

TEST(GroupCommunicator, LocalSizeCanBePretended) {
  run_thread_ranks(5, [](int rank, const CommunicatorFactory& factory) {
    CommunicatorOptions pairs = small_options();
    pairs.local_size = 2;
    const auto comm = factory(pairs);
    EXPECT_EQ(comm->local_size(), rank == 4 ? 1 : 2);
    EXPECT_EQ(comm->local_rank(), rank % 2);
    // Ranks 0, 2 and 4 are on three nodes.
    const auto apart = comm->split(rank % 2, 0);
    EXPECT_EQ(apart->local_size(), 1);
    EXPECT_EQ(apart->local_rank(), 0);
    const auto meta = make_meta_communicator(rank, 5, 2);
    EXPECT_EQ(meta->local_size(), comm->local_size());
    EXPECT_EQ(meta->local_rank(), comm->local_rank());
  });
}

/// Makes one call of every kind.
void call_everything(Communicator& comm, std::vector<float>& a, std::vector<float>& b) {
  const int n = comm.size();
  const std::vector<Event> none;
  std::vector<Event> events;
  events.push_back(
      comm.all_gather(a.data() + comm.rank() * 10, a.data(), 10, DataType::float32, 0, none, call_label));
  events.back().wait();
  events.push_back(comm.reduce_scatter(a.data(), DataType::float16, b.data(), DataType::float32, 11, {}, none,
                                       call_label));
  events.push_back(comm.all_reduce(b.data() + 20, 2, DataType::float64, ReduceOperation::sum, {"", "norm"}));
  events.push_back(comm.broadcast(b.data() + 40, 5, DataType::int32, n - 1, none, call_label));
  for (const Event& event : events) event.wait();
  comm.all_to_all(a.data(), b.data(), 3, DataType::float32, none, {"", "", Traffic::control}).wait();
  std::vector<RankElements> parts;
  for (int r = 0; r < n; ++r) parts.push_back({r * 10, r == comm.rank() ? 2 : 7});
  comm.all_to_all_v(a.data(), parts, b.data(), parts, DataType::float32, none, call_label).wait();
  if (n > 1 && comm.rank() == 0) comm.send(a.data(), 4, DataType::float32, 1, none, call_label).wait();
  if (n > 1 && comm.rank() == 1) comm.recv(a.data(), 4, DataType::float32, 0, none, call_label).wait();
  comm.barrier(call_label).wait();
  comm.split(0, 0)->barrier(call_label).wait();
}

TEST(Meta, CountsTracksAndHashesAsTheRealOnesDo) {
  for (const int size : {1, 2, 5}) {
    run_thread_ranks(size, [size](int rank, const CommunicatorFactory& factory) {
      Ledger real_ledger, meta_ledger;
      const auto host = make_host_resource(Tier::device), nowhere = make_meta_resource(Tier::device);
      TrackingResource real_memory(*host, real_ledger), meta_memory(*nowhere, meta_ledger);
      CommunicatorOptions real_options = small_options(), meta_options = small_options();
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
  // Nodes of two ranks, except the last with one; some groups fit them, others do not.
  for (const int group : {1, 2, 3, 5}) {
    std::atomic<std::int64_t> bytes{0};
    run_thread_ranks(5, [&](int rank, const CommunicatorFactory& factory) {
      CommunicatorOptions chosen = small_options();
      chosen.local_size = 2;
      chosen.collectives = NodeCollectives::shared;
      const auto real = factory(chosen);
      const auto meta = make_meta_communicator(rank, 5, 2, chosen);
      std::vector<bfloat16> full(5 * 700);
      std::vector<float> out(700);
      for (Communicator* comm : {real.get(), meta.get()}) {
        comm->reduce_scatter(full.data(), DataType::bfloat16, out.data(), DataType::float32, 700,
                             {group, false, 0}, {}, call_label)
            .wait();
      }
      const auto got = real->meter().total(Traffic::data), planned = meta->meter().total(Traffic::data);
      EXPECT_EQ(got.elements, 4 * 700);
      EXPECT_EQ(got.bytes, planned.bytes);
      bytes += got.bytes;
    });
    // Groups of two: nodes 0 and 1 send a sum for each of the three ranks elsewhere. Other groups are on
    // several nodes or have one rank.
    const std::int64_t sums = group == 2 ? 6 : 0;
    EXPECT_EQ(bytes, (20 - sums) * 700 * 2 + sums * 700 * 4) << group;
  }
}

}  // namespace
}  // namespace tranche
