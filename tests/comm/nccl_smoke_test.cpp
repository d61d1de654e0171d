/// NCCL between processes that share one GPU, each of which declares itself a separate node, over loopback
/// sockets. It is slow (every hop waits for a time slice of the GPU), but the only way to test several real
/// NCCL ranks without several GPUs.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "comm/device_communicator.h"
#include "device/cuda_probe.h"
#include "tests/comm/collective_suite.h"
#include "tests/comm/mpi_main.h"
#include "tranche/comm/backends.h"

namespace tranche {
namespace {

TEST(NcclSmoke, ProcessesOnOneGpuExchangeOverLoopback) {
  const detail::CudaProbe probe = detail::probe_cuda();
  if (probe.devices.empty()) GTEST_SKIP() << probe.problem;
  if (probe.emulated) GTEST_SKIP() << "the emulated NCCL joins threads, not processes";
  if (nccl_version() == "not compiled") GTEST_SKIP() << "NCCL is not part of this build";
  setenv("NCCL_HOSTID", ("rank" + std::to_string(test::world().rank())).c_str(), 1);
  const char* settings[][2] = {{"NCCL_SOCKET_IFNAME", "lo"}, {"NCCL_NET", "Socket"},
                               {"NCCL_IB_DISABLE", "1"},     {"NCCL_MNNVL_ENABLE", "0"},
                               {"NCCL_NVLS_ENABLE", "0"},    {"NCCL_MAX_CTAS", "2"},
                               {"NCCL_ALGO", "Ring"},        {"NCCL_PROTO", "Simple"}};
  for (const auto& [name, value] : settings) setenv(name, value, 0);
  DeviceOptions gpu;
  gpu.kind = DeviceKind::cuda;
  const auto device = make_device(gpu);
  CommunicatorOptions host;
  host.timeout_seconds = 120;
  host.staging_bytes = test::mpi_staging_bytes;
  comm::DeviceCommunicatorOptions options;
  options.transport = comm::DeviceTransport::nccl;
  options.timeout_seconds = 120;
  options.staging_bytes = 4 << 20;
  const auto comm = comm::make_device_communicator(*device, make_mpi_communicator(host), options);
  EXPECT_EQ(comm->backend(), "nccl over mpi");
  test::check_meter(*comm, {device.get(), true});
  test::check_all_to_all(*comm, {device.get(), true});
  test::check_all_to_all_v(*comm, 64 << 10, {device.get(), true});
  test::check_many_in_flight(*comm, 8, {device.get(), true});
}

}  // namespace
}  // namespace tranche
