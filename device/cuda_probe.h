#pragma once
/// The CUDA devices of the machine. Needs no CUDA header, so that every layer can use it.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tranche/device/device.h"

namespace tranche::detail {

struct CudaDeviceInfo {
  std::string name;
  int compute_major = 0;
  int compute_minor = 0;
  std::int64_t memory_bytes = 0;
  int multiprocessors = 0;
};

struct CudaProbe {
  bool compiled = false;    ///< this build contains the CUDA runtime
  bool emulated = false;    ///< its devices are tests/cuda_emulation on the CPU (TRANCHE_CUDA=EMULATED)
  int runtime_version = 0;  ///< 13000 for 13.0; 0 when not compiled
  int driver_version = 0;   ///< 0 when there is no driver
  std::vector<CudaDeviceInfo> devices;
  std::string problem;  ///< why there are no devices; empty when there are
  std::string warning;  ///< environment variables that the first call changed
};

/// Never throws on a machine without GPU or driver: `problem` gives the reason. The first call sets
/// CUDA_DEVICE_MAX_CONNECTIONS to 32 in the environment, before the driver starts (device/launch_queues.h).
CudaProbe probe_cuda();

/// Makes the device of GPU options.index modulo the number of GPUs. Throws NotCompiled naming the option when
/// the build has no CUDA, ConfigurationError when no GPU or driver was found.
std::unique_ptr<Device> make_cuda_device(const DeviceOptions& options);

}  // namespace tranche::detail
