/// Device memory that is staged through a host communicator over several declared nodes.
#include <gtest/gtest.h>

#include <memory>

#include "comm/device_communicator.h"
#include "tests/comm/collective_suite.h"
#include "tranche/comm/backends.h"
#include "tranche/device/memory_resources.h"

namespace tranche {
namespace {

TEST(StagedOverNodes, SumsThatCrossAreCountedInFp32) {
  // Two nodes of two ranks. For each group of two ranks on a node a sum crosses to the rank with the same
  // number on the other node, chunk by chunk, whatever size is staged at once. Other groups are on both nodes
  // or have one rank.
  constexpr std::int64_t small_staging = 64 << 10, count = 20011;
  for (const int group : {1, 2, 4}) {
    run_thread_ranks(4, [&](int, const CommunicatorFactory& factory) {
      CommunicatorOptions nodes;
      nodes.timeout_seconds = 60;
      nodes.staging_bytes = small_staging;
      nodes.local_size = 2;
      nodes.collectives = NodeCollectives::shared;
      const std::unique_ptr<Device> device = make_device({});
      comm::DeviceCommunicatorOptions staged;
      staged.transport = comm::DeviceTransport::staged;
      staged.timeout_seconds = 60;
      staged.staging_bytes = small_staging;
      const auto comm = comm::make_device_communicator(*device, factory(nodes), staged);
      test::check_reduce_scatter(*comm, small_staging, {device.get(), true});
      comm->meter().reset();
      MemoryResource& memory = device->memory(Tier::device);
      const Buffer full(memory, 4 * count * 2, Category::other, "full");
      const Buffer sums(memory, count * 4, Category::other, "sums");
      const ReductionOptions options{group, false, 0};
      comm->reduce_scatter(full.data(), DataType::bfloat16, sums.data(), DataType::float32, count, options,
                           {}, {"h.3", "backward"})
          .wait();
      const std::int64_t crossing = group == 2 ? count : 0;
      EXPECT_EQ(comm->summed_elements_sent(count, DataType::bfloat16, options), crossing);
      EXPECT_EQ(comm->meter().total(Traffic::data).elements, 3 * count);
      EXPECT_EQ(comm->meter().total(Traffic::data).bytes, 3 * count * 2 + crossing * 2);
    });
  }
}

}  // namespace
}  // namespace tranche
