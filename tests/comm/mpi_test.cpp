/// The suite of the thread ranks, under mpirun.
#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

#include "tranche/comm/backends.h"
#include "tranche/comm/device_communicator.h"
#include "tranche/core/error.h"
#include "tranche/device/cuda_probe.h"
#include "tranche/tests/comm/collective_suite.h"
#include "tranche/tests/comm/mpi_main.h"

namespace tranche {
namespace {

TEST(Mpi, EveryCollectiveMatchesBruteForce) {
  EXPECT_EQ(test::world().backend(), "mpi");
  EXPECT_EQ(test::world().size(), std::atoi(std::getenv("OMPI_COMM_WORLD_SIZE")));
  test::check_everything(test::world(), test::mpi_slab_bytes);
}

TEST(Mpi, RanksOfThisHostAreCounted) {
  EXPECT_EQ(test::world().local_size(), test::world().size());
  EXPECT_EQ(test::world().local_rank(), test::world().rank());
  CommunicatorOptions options;
  options.local_size = 2;
  options.slab_bytes = test::mpi_slab_bytes;
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
  options.slab_bytes = test::mpi_slab_bytes;
  options.timeout_seconds = 60;
  DeviceCommunicatorOptions staged;
  staged.transport = DeviceTransport::staged;
  staged.slab_bytes = test::mpi_slab_bytes;
  staged.timeout_seconds = 60;
  std::vector<DeviceOptions> devices(1);
  // A GPU is taken too where there is one; the ranks share it.
  if (!probe_cuda().devices.empty()) devices.push_back({DeviceKind::cuda});
  for (const DeviceOptions& each : devices) {
    SCOPED_TRACE(name_of(each.kind));
    const auto device = make_device(each);
    const auto comm = make_device_communicator(*device, make_mpi_communicator(options), staged);
    EXPECT_EQ(comm->backend(), comm->size() == 1 ? "self" : "staged over mpi");
    test::check_everything(*comm, test::mpi_slab_bytes, {device.get(), true});
  }
}

TEST(Mpi, ProcessesCannotShareAddresses) {
  if (test::world().size() == 1) return;
  DeviceCommunicatorOptions shared;
  shared.transport = DeviceTransport::shared;
  const auto device = make_device({});
  try {
    make_device_communicator(*device, test::world().split(0, test::world().rank()), shared);
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
