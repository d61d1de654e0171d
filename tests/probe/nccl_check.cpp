// A communicator of one rank: NCCL loads, finds the GPU, and runs its kernel.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdio>
#include <string>
#include <vector>

#include "check.h"
#include "tranche/device/device.h"

namespace tranche::gpu_probe {
namespace {

void require(ncclResult_t result, const std::string& call) {
  expect(result == ncclSuccess, call + ": " + ncclGetErrorString(result) + "; " + ncclGetLastError(nullptr));
}

}  // namespace

void check_nccl() {
  const auto device = make_device({.kind = DeviceKind::cuda});
  Stream& stream = device->compute_stream();
  int version = 0;
  require(ncclGetVersion(&version), "ncclGetVersion");
  std::printf("NCCL %d at run time, %d when compiled\n", version, NCCL_VERSION_CODE);
  ncclUniqueId id;
  require(ncclGetUniqueId(&id), "ncclGetUniqueId");
  ncclComm_t communicator = nullptr;
  require(ncclCommInitRank(&communicator, 1, id, 0), "ncclCommInitRank");
  const std::vector<float> sent(5000, 1.5f);
  const auto bytes = static_cast<std::int64_t>(sent.size() * sizeof(float));
  const Buffer from(device->memory(Tier::device), bytes, Category::other, "probe"),
      to(device->memory(Tier::device), bytes, Category::other, "probe");
  device->copy_from_host(stream, from.data(), sent.data(), bytes);
  device->fill_bytes(stream, to.data(), 0xff, bytes);
  require(ncclAllReduce(from.data(), to.data(), sent.size(), ncclFloat, ncclSum, communicator,
                        static_cast<cudaStream_t>(stream.native_handle())),
          "ncclAllReduce");
  std::vector<float> received(sent.size());
  device->copy_to_host(stream, received.data(), to.data(), bytes);
  stream.synchronize();
  require(ncclCommDestroy(communicator), "ncclCommDestroy");
  for (std::size_t i = 0; i < received.size(); ++i) {
    expect(received[i] == sent[i], "element " + std::to_string(i) + " of the sum over one rank is " +
                                       std::to_string(received[i]) + ", not 1.5");
  }
}

}  // namespace tranche::gpu_probe
