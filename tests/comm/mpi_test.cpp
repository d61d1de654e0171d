/// Runs the suite of the thread ranks under mpirun.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "comm/device_communicator.h"
#include "comm/window_memory.h"
#include "device/cuda_probe.h"
#include "tests/comm/collective_suite.h"
#include "tests/comm/mpi_main.h"
#include "tranche/comm/backends.h"
#include "tranche/core/error.h"
#include "tranche/device/ledger.h"
#include "tranche/device/memory_resources.h"

namespace tranche {
namespace {

TEST(Mpi, EveryCollectiveMatchesBruteForce) {
  EXPECT_EQ(test::world().backend(), "mpi");
  EXPECT_EQ(test::world().size(), std::atoi(std::getenv("OMPI_COMM_WORLD_SIZE")));
  test::check_everything(test::world(), test::mpi_staging_bytes);
}

std::unique_ptr<Communicator> world_with(NodeCollectives collectives) {
  CommunicatorOptions options;
  options.timeout_seconds = 60;
  options.staging_bytes = test::mpi_staging_bytes;
  options.collectives = collectives;
  return make_mpi_communicator(options);
}

TEST(Mpi, EveryWayMatchesBruteForce) {
  for (const auto collectives : {NodeCollectives::messages, NodeCollectives::shared}) {
    SCOPED_TRACE(name_of(collectives));
    test::check_everything(*world_with(collectives), test::mpi_staging_bytes);
  }
}

TEST(Mpi, DeclaredNodesGiveTheSameBits) {
  if (test::world().size() < 3) return;
  CommunicatorOptions options;
  options.timeout_seconds = 60;
  options.staging_bytes = test::mpi_staging_bytes;
  options.collectives = NodeCollectives::shared;
  options.local_size = 2;
  test::check_all_gather(*make_mpi_communicator(options));
  test::check_reduce_scatter(*make_mpi_communicator(options), test::mpi_staging_bytes);
  options.local_size = 1;
  try {
    make_mpi_communicator(options);
    FAIL() << "not refused";
  } catch (const ConfigurationError& error) {
    EXPECT_EQ(
        error.message(),
        "tranche.collectives: shared was asked for, but no two ranks share a node; choose auto or messages");
  }
}

TEST(Mpi, BuffersInTheWindowAreReadInPlace) {
  // These are large enough for the window even if ranks choose by size; the shards have prime sizes.
  comm::WindowMemory window(Tier::device);
  Ledger ledger;
  TrackingResource memory(window, ledger);
  CommunicatorOptions options;
  options.timeout_seconds = 60;
  options.staging_bytes = test::mpi_staging_bytes;
  options.window = &window;
  options.memory = &memory;
  const auto comm = make_mpi_communicator(options);
  const std::int64_t n = comm->size(), rank = comm->rank(), count = 300007;
  Buffer full(memory, n * count * 4, Category::gradients, "gradients");
  Buffer shard(memory, count * 4, Category::parameters, "shard");
  auto* gradients = static_cast<float*>(full.data());
  auto* sums = static_cast<float*>(shard.data());
  EXPECT_TRUE(window.find(gradients + 7, 4 * (n * count - 7)).has_value());
  EXPECT_FALSE(window.find(gradients + 7, 4 * n * count + 8192).has_value());
  for (const std::int64_t round : {1, 2}) {
    for (std::int64_t i = 0; i < n * count; ++i) gradients[i] = static_cast<float>(i % 1000 + rank * round);
    comm->reduce_scatter(gradients, DataType::float32, sums, DataType::float32, count, {}, {},
                         {"h.3", "backward"})
        .wait();
    for (std::int64_t i = 0; i < count; ++i) {
      ASSERT_EQ(sums[i], static_cast<float>(n * ((rank * count + i) % 1000) + round * n * (n - 1) / 2)) << i;
    }
    comm->all_gather(sums, gradients, count, DataType::float32, 0, {}, {"h.3", "forward"}).wait();
    for (std::int64_t i = 0; i < n * count; ++i) {
      ASSERT_EQ(gradients[i], static_cast<float>(n * (i % 1000) + round * n * (n - 1) / 2)) << i;
    }
  }
  // Freed memory may be used again, at another offset of the file.
  full.reset();
  Buffer again(memory, n * count * 4, Category::gradients, "gradients again");
  std::fill_n(static_cast<float*>(again.data()), n * count, 1.0f);
  comm->reduce_scatter(again.data(), DataType::float32, sums, DataType::float32, count, {}, {}, {}).wait();
  EXPECT_EQ(sums[count - 1], static_cast<float>(n));
  EXPECT_EQ(ledger.account(Tier::device).current[Category::gradients], aligned_bytes(n * count * 4));
}

TEST(Mpi, SharedMemoryThatIsNotThereIsRefusedByName) {
  if (test::world().size() == 1) return;
  const auto heap = make_host_resource(Tier::device);
  CommunicatorOptions options;
  options.staging_bytes = test::mpi_staging_bytes;
  options.memory = heap.get();  // not memory of a window
  test::check_all_reduce(*make_mpi_communicator(options),
                         test::mpi_staging_bytes);  // so by messages between ranks
  options.collectives = NodeCollectives::shared;
  try {
    make_mpi_communicator(options);
    FAIL() << "not refused";
  } catch (const ConfigurationError& error) {
    EXPECT_EQ(error.message(),
              "tranche.collectives: shared was asked for, but rank 0 was made without memory that others can "
              "read; choose auto or messages");
  }
}

TEST(Mpi, RanksOfThisNodeAreCounted) {
  EXPECT_EQ(test::world().local_size(), test::world().size());
  EXPECT_EQ(test::world().local_rank(), test::world().rank());
  CommunicatorOptions options;
  options.local_size = 2;
  options.staging_bytes = test::mpi_staging_bytes;
  const auto pairs = make_mpi_communicator(options);  // a second world beside the first, on the same thread
  EXPECT_EQ(pairs->local_size(), pairs->rank() / 2 * 2 + 2 <= pairs->size() ? 2 : 1);
  EXPECT_EQ(pairs->local_rank(), pairs->rank() % 2);
  test::check_many_in_flight(*pairs, 10);
}

TEST(Mpi, ManyInFlightAgain) {
  for (int i = 0; i < 3; ++i) test::check_many_in_flight(test::world(), 60);
}

TEST(Mpi, CarriesDeviceMemoryThroughStaging) {
  CommunicatorOptions options;
  options.staging_bytes = test::mpi_staging_bytes;
  options.timeout_seconds = 60;
  comm::DeviceCommunicatorOptions staged;
  staged.transport = comm::DeviceTransport::staged;
  staged.staging_bytes = test::mpi_staging_bytes;
  staged.timeout_seconds = 60;
  std::vector<DeviceOptions> devices(1);
  // Uses a GPU too if there is one; the ranks share it.
  if (!detail::probe_cuda().devices.empty()) devices.push_back({DeviceKind::cuda});
  for (const DeviceOptions& each : devices) {
    SCOPED_TRACE(name_of(each.kind));
    const auto device = make_device(each);
    const auto comm = comm::make_device_communicator(*device, make_mpi_communicator(options), staged);
    EXPECT_EQ(comm->backend(), comm->size() == 1 ? "self" : "staged over mpi");
    test::check_everything(*comm, test::mpi_staging_bytes, {device.get(), true});
  }
}

TEST(Mpi, ProcessesCannotShareAddresses) {
  if (test::world().size() == 1) return;
  comm::DeviceCommunicatorOptions shared;
  shared.transport = comm::DeviceTransport::shared;
  const auto device = make_device({});
  try {
    comm::make_device_communicator(*device, test::world().split(0, test::world().rank()), shared);
    FAIL() << "not refused";
  } catch (const ConfigurationError& error) {
    EXPECT_EQ(
        error.message(),
        "tranche.device_transport: shared was asked for, but ranks 0 and 1 are not threads of one process; "
        "choose auto or staged");
  }
}

TEST(Mpi, IsToldByTheEnvironment) {
  EXPECT_TRUE(started_by_mpi_launcher());
  EXPECT_EQ(mpi_version().rfind("Open MPI ", 0), 0u) << mpi_version();
  EXPECT_EQ(mpi_version().find(','), std::string::npos) << mpi_version();
}

}  // namespace
}  // namespace tranche
