// Devices, versions and attributes.
#include <fmt/format.h>

#include "tests/cuda_emulation/control.h"
#include "tests/cuda_emulation/state.h"

namespace cuda_emulation {
namespace {

constinit thread_local int device_of_thread = 0;

std::atomic<std::int64_t>& total() {
  static std::atomic<std::int64_t>& instance =
      *new std::atomic<std::int64_t>(environment("TRANCHE_EMULATED_MEMORY", std::int64_t{4} << 30));
  return instance;
}

/// The version that cudaDriverGetVersion returns.
std::atomic<int>& driver_number() {
  static std::atomic<int>& instance = *new std::atomic<int>(
      static_cast<int>(environment("TRANCHE_EMULATED_DRIVER", device_count() > 0 ? CUDART_VERSION : 0)));
  return instance;
}

}  // namespace

int current_device() {
  return device_of_thread;
}

int device_count() {
  static const int count = static_cast<int>(environment("TRANCHE_EMULATED_GPUS", 1));
  return count;
}

std::int64_t total_memory() {
  return total();
}

void set_total_memory(std::int64_t bytes) {
  total() = bytes;
}

void set_driver_version(int version) {
  driver_number() = version;
}

}  // namespace cuda_emulation

using namespace cuda_emulation;

cudaError_t cudaGetDeviceCount(int* count) {
  return call("cudaGetDeviceCount", [&] {
    *count = device_count();
    if (*count > 0 && driver_number() / 1000 < CUDART_VERSION / 1000) return cudaErrorInsufficientDriver;
    return *count > 0 ? cudaSuccess : cudaErrorNoDevice;
  });
}

cudaError_t cudaSetDevice(int device) {
  return call(
      "cudaSetDevice",
      [&] {
        if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
        device_of_thread = device;
        return sticky_error(device);
      },
      Sticky::ignored);
}

cudaError_t cudaGetDevice(int* device) {
  return call("cudaGetDevice", [&] {
    *device = device_of_thread;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceSynchronize() {
  return call("cudaDeviceSynchronize", [&] {
    count_host_wait();
    if (const cudaError_t refused = refuse_under_capture("cudaDeviceSynchronize"); refused != cudaSuccess) {
      return refused;
    }
    drain_device(current_device());
    return sticky_error(current_device());
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return call("cudaGetDeviceProperties", [&] {
    if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
    *properties = cudaDeviceProp{};
    fmt::format_to_n(properties->name, sizeof properties->name - 1, "emulated GPU");
    properties->uuid.bytes[0] = static_cast<char>(device + 1);
    properties->major = 9;
    properties->minor = 0;
    properties->totalGlobalMem = static_cast<std::size_t>(total_memory());
    properties->multiProcessorCount = 132;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = 0x7fffffff;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->sharedMemPerBlock = 48 * 1024;
    properties->sharedMemPerBlockOptin = 227 * 1024;
    properties->sharedMemPerMultiprocessor = 228 * 1024;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->totalConstMem = 65536;
    properties->l2CacheSize = 50 << 20;
    properties->memoryBusWidth = 5120;
    properties->asyncEngineCount = 3;
    properties->concurrentKernels = 1;
    properties->unifiedAddressing = 1;
    properties->canMapHostMemory = 1;
    properties->memoryPoolsSupported = 1;
    properties->streamPrioritiesSupported = 1;
    properties->pciBusID = device + 1;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return call("cudaDeviceGetAttribute", [&] {
    if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
    switch (attribute) {
      case cudaDevAttrComputeCapabilityMajor:
        *value = 9;
        return cudaSuccess;
      case cudaDevAttrComputeCapabilityMinor:
        *value = 0;
        return cudaSuccess;
      case cudaDevAttrMultiProcessorCount:
        *value = 132;
        return cudaSuccess;
      case cudaDevAttrWarpSize:
        *value = 32;
        return cudaSuccess;
      case cudaDevAttrMaxThreadsPerBlock:
        *value = 1024;
        return cudaSuccess;
      case cudaDevAttrMaxThreadsPerMultiProcessor:
        *value = 2048;
        return cudaSuccess;
      case cudaDevAttrMaxSharedMemoryPerBlock:
        *value = 48 * 1024;
        return cudaSuccess;
      case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = 227 * 1024;
        return cudaSuccess;
      case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = 228 * 1024;
        return cudaSuccess;
      case cudaDevAttrMaxRegistersPerBlock:
        *value = 65536;
        return cudaSuccess;
      case cudaDevAttrL2CacheSize:
        *value = 50 << 20;
        return cudaSuccess;
      case cudaDevAttrClockRate:
        *value = 1980000;
        return cudaSuccess;
      case cudaDevAttrMemoryClockRate:
        *value = 2619000;
        return cudaSuccess;
      case cudaDevAttrGlobalMemoryBusWidth:
        *value = 5120;
        return cudaSuccess;
      case cudaDevAttrMemoryPoolsSupported:
        *value = 1;
        return cudaSuccess;
      case cudaDevAttrUnifiedAddressing:
        *value = 1;
        return cudaSuccess;
      case cudaDevAttrConcurrentKernels:
        *value = 1;
        return cudaSuccess;
      case cudaDevAttrAsyncEngineCount:
        *value = 3;
        return cudaSuccess;
      case cudaDevAttrHostRegisterSupported:
        *value = 1;
        return cudaSuccess;
      case cudaDevAttrPageableMemoryAccess:
        *value = 0;
        return cudaSuccess;
      case cudaDevAttrIntegrated:
        *value = 0;
        return cudaSuccess;
      case cudaDevAttrCooperativeLaunch:
        *value = 0;
        return cudaSuccess;
      default:
        return misuse(
            cudaErrorNotSupported,
            fmt::format("cudaDeviceGetAttribute: attribute {} is not emulated", static_cast<int>(attribute)));
    }
  });
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  return call("cudaDeviceGetPCIBusId", [&] {
    if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
    if (length < 13) return cudaErrorInvalidValue;
    *fmt::format_to_n(text, length - 1, "0000:{:02x}:00.0", device + 1).out = '\0';
    return cudaSuccess;
  });
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = driver_number();
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute, int) {
  return call("cudaFuncSetAttribute",
              [&] { return function == nullptr ? cudaErrorInvalidValue : cudaSuccess; });
}

// Assumes that registers are never short; only shared memory and threads are limits.
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads,
                                                          std::size_t shared) {
  return call("cudaOccupancyMaxActiveBlocksPerMultiprocessor", [&] {
    if (threads < 1 || threads > 1024) return cudaErrorInvalidValue;
    const std::size_t each = shared + 1024;  // the hardware reserves 1 KiB for each block
    *blocks = std::min(32, std::min(2048 / threads, static_cast<int>(std::size_t{228 * 1024} / each)));
    return cudaSuccess;
  });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function,
                                                                   int threads, std::size_t shared,
                                                                   unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return call("cudaDeviceCanAccessPeer", [&] {
    if (std::min(device, peer) < 0 || std::max(device, peer) >= device_count()) return cudaErrorInvalidDevice;
    *can = device != peer;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  return call("cudaDeviceEnablePeerAccess", [&] {
    return peer < 0 || peer >= device_count() || peer == current_device() ? cudaErrorInvalidDevice
                                                                          : cudaSuccess;
  });
}

cudaError_t cudaSetDeviceFlags(unsigned) {
  return call("cudaSetDeviceFlags", [] { return cudaSuccess; });
}

cudaError_t cudaInitDevice(int device, unsigned, unsigned) {
  return call("cudaInitDevice",
              [&] { return device < 0 || device >= device_count() ? cudaErrorInvalidDevice : cudaSuccess; });
}
