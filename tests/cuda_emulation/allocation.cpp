// Memory functions of the runtime: device, pinned, registered and stream-ordered memory.
#include <fmt/format.h>

#include "tests/cuda_emulation/state.h"

using namespace cuda_emulation;

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  return call("cudaMalloc", [&] {
    if (data == nullptr) return cudaErrorInvalidValue;
    *data = nullptr;
    if (const cudaError_t refused = refuse_under_capture("cudaMalloc"); refused != cudaSuccess)
      return refused;
    if (bytes == 0) return cudaSuccess;
    *data = allocate_device(current_device(), bytes);
    return *data == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
  });
}

cudaError_t cudaFree(void* data) {
  return call("cudaFree", [&] {
    if (const cudaError_t refused = refuse_under_capture("cudaFree"); refused != cudaSuccess) return refused;
    if (data == nullptr) return cudaSuccess;
    Allocation allocation;
    if (find(data, allocation)) drain_device(allocation.device);  // the real function waits too
    if (release(data, MemoryKind::device)) return cudaSuccess;
    return misuse(cudaErrorInvalidValue,
                  fmt::format("cudaFree: {} is not the beginning of a live allocation", data));
  });
}

// Stream-ordered memory is allocated at once and freed in the stream's order.
cudaError_t cudaMallocAsync(void** data, std::size_t bytes, cudaStream_t stream) {
  return call("cudaMallocAsync", [&] {
    if (data == nullptr) return cudaErrorInvalidValue;
    *data = nullptr;
    if (device_of(stream) < 0)
      return misuse(cudaErrorInvalidResourceHandle, "cudaMallocAsync: no live stream");
    if (is_capturing(stream)) return refuse_on_captured("cudaMallocAsync (not emulated there)", stream);
    if (bytes == 0) return cudaSuccess;
    *data = allocate_device(device_of(stream), bytes);
    return *data == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
  });
}

cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  return call("cudaFreeAsync", [&] {
    if (data == nullptr) return cudaSuccess;
    Allocation allocation;
    if (!find(data, allocation) || allocation.data != data || allocation.kind != MemoryKind::device) {
      return misuse(cudaErrorInvalidValue,
                    fmt::format("cudaFreeAsync: {} is not the beginning of a live allocation", data));
    }
    if (is_capturing(stream)) return refuse_on_captured("cudaFreeAsync (not emulated there)", stream);
    return submit(stream, {[data] { release(data, MemoryKind::device); }, false});
  });
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  return call("cudaMemGetInfo", [&] {
    *total = static_cast<std::size_t>(total_memory());
    *free =
        static_cast<std::size_t>(std::max<std::int64_t>(0, total_memory() - bytes_in_use(current_device())));
    return cudaSuccess;
  });
}

cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned flags) {
  return call("cudaHostAlloc", [&] {
    constexpr unsigned known = cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined;
    if (data == nullptr || (flags & ~known) != 0) return cudaErrorInvalidValue;
    *data = nullptr;
    if (const cudaError_t refused = refuse_under_capture("cudaHostAlloc"); refused != cudaSuccess)
      return refused;
    if (bytes == 0) return cudaSuccess;
    *data = allocate_host(bytes);
    return *data == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
  });
}

cudaError_t cudaMallocHost(void** data, std::size_t bytes) {
  return cudaHostAlloc(data, bytes, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void* data) {
  return call("cudaFreeHost", [&] {
    if (const cudaError_t refused = refuse_under_capture("cudaFreeHost"); refused != cudaSuccess)
      return refused;
    if (data == nullptr) return cudaSuccess;
    for (int device = 0; device < device_count(); ++device) drain_device(device);
    if (release(data, MemoryKind::host)) return cudaSuccess;
    return misuse(cudaErrorInvalidValue,
                  fmt::format("cudaFreeHost: {} did not come from cudaHostAlloc", data));
  });
}

cudaError_t cudaHostRegister(void* data, std::size_t bytes, unsigned) {
  return call("cudaHostRegister", [&] {
    if (data == nullptr || bytes == 0) return cudaErrorInvalidValue;
    Allocation first, last;
    if (find(data, first) || find(static_cast<unsigned char*>(data) + bytes - 1, last)) {
      return cudaErrorHostMemoryAlreadyRegistered;
    }
    add_allocation({static_cast<unsigned char*>(data), bytes, MemoryKind::registered, 0, false});
    return cudaSuccess;
  });
}

cudaError_t cudaHostUnregister(void* data) {
  return call("cudaHostUnregister", [&] {
    Allocation allocation;
    if (!find(data, allocation) || allocation.data != data || allocation.kind != MemoryKind::registered) {
      return misuse(cudaErrorHostMemoryNotRegistered,
                    fmt::format("cudaHostUnregister: {} is not the beginning of registered memory", data));
    }
    for (int device = 0; device < device_count(); ++device) drain_device(device);
    remove_allocation(data);
    return cudaSuccess;
  });
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  return call("cudaHostGetDevicePointer", [&] {
    Allocation allocation;
    if (!find(host, allocation) || allocation.kind == MemoryKind::device) return cudaErrorInvalidValue;
    *device = host;  // there is one address space
    return cudaSuccess;
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  return call("cudaPointerGetAttributes", [&] {
    *attributes = cudaPointerAttributes{};
    Allocation allocation;
    if (!cuda_emulation::find(pointer, allocation)) {
      attributes->type = cudaMemoryTypeUnregistered;
      attributes->device = -2;
      attributes->hostPointer = const_cast<void*>(pointer);
      return cudaSuccess;
    }
    const bool device = allocation.kind == MemoryKind::device;
    attributes->type = device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    attributes->device = allocation.device;
    attributes->devicePointer = const_cast<void*>(pointer);
    attributes->hostPointer = device ? nullptr : const_cast<void*>(pointer);
    return cudaSuccess;
  });
}

// The only pool is the device itself, which keeps no freed memory.
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  return call("cudaDeviceGetDefaultMemPool", [&] {
    if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
    *pool = reinterpret_cast<cudaMemPool_t>(static_cast<std::uintptr_t>(device) + 1);
    return cudaSuccess;
  });
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr, void* value) {
  return call("cudaMemPoolSetAttribute",
              [&] { return pool == nullptr || value == nullptr ? cudaErrorInvalidValue : cudaSuccess; });
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, std::size_t) {
  return call("cudaMemPoolTrimTo", [&] { return pool == nullptr ? cudaErrorInvalidValue : cudaSuccess; });
}
