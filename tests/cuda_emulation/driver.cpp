// Functions of the driver that programs fetch at run time: memory that is mapped separately from its
// addresses, and streams that wait for a word in memory.
#include <cuda.h>
#include <fmt/format.h>
#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <map>

#include "tests/cuda_emulation/state.h"

namespace cuda_emulation {
namespace {

constexpr std::size_t granularity = std::size_t{2} << 20;

struct Handle {
  std::size_t bytes = 0;
  int device = 0;
  bool released = false;
  int mappings = 0;
};

struct Mapping {
  std::size_t bytes = 0;
  CUmemGenericAllocationHandle handle = 0;
  bool accessible = false;
};

struct Driver {
  std::mutex mutex;
  std::map<CUdeviceptr, std::size_t> ranges;  // reserved addresses
  std::map<CUmemGenericAllocationHandle, Handle> handles;
  std::map<CUdeviceptr, Mapping> mappings;
  CUmemGenericAllocationHandle next = 1;
};

Driver& driver() {
  static Driver& instance = *new Driver;
  return instance;
}

template <class Body>
CUresult driver_call(const char* name, Body&& body) {
  const int refused = begin_call(name, CUDA_ERROR_NOT_PERMITTED, true);
  return refused != 0 ? static_cast<CUresult>(refused) : body();
}

CUresult wrong(const std::string& what) {
  misuse(cudaErrorInvalidValue, what);
  return CUDA_ERROR_INVALID_VALUE;
}

void* pointer(CUdeviceptr address) {
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address));
}

void drop_if_unused(Driver& d, std::map<CUmemGenericAllocationHandle, Handle>::iterator handle) {
  if (!handle->second.released || handle->second.mappings > 0) return;
  give_bytes(handle->second.device, static_cast<std::int64_t>(handle->second.bytes));
  d.handles.erase(handle);
}

CUresult device_get_attribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return driver_call("cuDeviceGetAttribute", [&] {
    if (device < 0 || device >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
    *value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ||
             attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
    return CUDA_SUCCESS;
  });
}

CUresult get_granularity(std::size_t* bytes, const CUmemAllocationProp* properties,
                         CUmemAllocationGranularity_flags) {
  return driver_call("cuMemGetAllocationGranularity", [&] {
    if (properties->location.id >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = granularity;
    return CUDA_SUCCESS;
  });
}

CUresult address_reserve(CUdeviceptr* address, std::size_t bytes, std::size_t alignment, CUdeviceptr,
                         unsigned long long) {
  return driver_call("cuMemAddressReserve", [&] {
    if (bytes == 0 || bytes % granularity != 0) {
      return wrong(fmt::format("cuMemAddressReserve: {} bytes are no multiple of the granularity", bytes));
    }
    void* range = reserve_addresses(bytes, std::max(alignment, granularity));
    if (range == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(range));
    std::lock_guard lock(driver().mutex);
    driver().ranges[*address] = bytes;
    return CUDA_SUCCESS;
  });
}

CUresult address_free(CUdeviceptr address, std::size_t bytes) {
  return driver_call("cuMemAddressFree", [&] {
    Driver& d = driver();
    std::lock_guard lock(d.mutex);
    const auto range = d.ranges.find(address);
    if (range == d.ranges.end() || range->second != bytes) {
      return wrong("cuMemAddressFree: no such reserved range");
    }
    const auto mapping = d.mappings.lower_bound(address);
    if (mapping != d.mappings.end() && mapping->first < address + bytes) {
      return wrong("cuMemAddressFree: the range still has memory mapped");
    }
    d.ranges.erase(range);
    recycle_addresses(pointer(address), bytes);
    return CUDA_SUCCESS;
  });
}

CUresult create(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                const CUmemAllocationProp* properties, unsigned long long) {
  return driver_call("cuMemCreate", [&] {
    if (bytes == 0 || bytes % granularity != 0) {
      return wrong(fmt::format("cuMemCreate: {} bytes are no multiple of the granularity", bytes));
    }
    if (!take_bytes(properties->location.id, static_cast<std::int64_t>(bytes)))
      return CUDA_ERROR_OUT_OF_MEMORY;
    count_allocation();
    Driver& d = driver();
    std::lock_guard lock(d.mutex);
    *handle = d.next++;
    d.handles[*handle] = {bytes, properties->location.id, false, 0};
    return CUDA_SUCCESS;
  });
}

CUresult release_handle(CUmemGenericAllocationHandle handle) {
  return driver_call("cuMemRelease", [&] {
    Driver& d = driver();
    std::lock_guard lock(d.mutex);
    const auto found = d.handles.find(handle);
    if (found == d.handles.end() || found->second.released) return wrong("cuMemRelease: no such handle");
    found->second.released = true;
    drop_if_unused(d, found);
    return CUDA_SUCCESS;
  });
}

CUresult map(CUdeviceptr address, std::size_t bytes, std::size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long) {
  return driver_call("cuMemMap", [&] {
    Driver& d = driver();
    std::lock_guard lock(d.mutex);
    const auto found = d.handles.find(handle);
    if (found == d.handles.end() || found->second.released) return wrong("cuMemMap: no such handle");
    if (offset != 0 || bytes != found->second.bytes || found->second.mappings > 0) {
      return wrong("cuMemMap: only whole handles, mapped once at a time, are emulated");
    }
    auto range = d.ranges.upper_bound(address);
    if (range == d.ranges.begin()) return wrong("cuMemMap: the addresses are not reserved");
    --range;
    if (address % granularity != 0 || address + bytes > range->first + range->second) {
      return wrong("cuMemMap: the addresses are not reserved, or not aligned");
    }
    auto after = d.mappings.lower_bound(address + bytes);
    if (after != d.mappings.begin() && std::prev(after)->first + std::prev(after)->second.bytes > address) {
      return wrong("cuMemMap: the addresses have memory already");
    }
    d.mappings[address] = {bytes, handle, false};
    ++found->second.mappings;
    return CUDA_SUCCESS;
  });
}

CUresult set_access(CUdeviceptr address, std::size_t bytes, const CUmemAccessDesc* access,
                    std::size_t count) {
  return driver_call("cuMemSetAccess", [&] {
    Driver& d = driver();
    std::lock_guard lock(d.mutex);
    const auto mapping = d.mappings.find(address);
    if (mapping == d.mappings.end() || mapping->second.bytes != bytes) {
      return wrong("cuMemSetAccess: the range is no whole mapping");
    }
    if (count != 1 || access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
      return wrong("cuMemSetAccess: only reading and writing by one device is emulated");
    }
    if (mapping->second.accessible) return CUDA_SUCCESS;
    auto* data = static_cast<unsigned char*>(pointer(address));
    if (mprotect(data, bytes, PROT_READ | PROT_WRITE) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
    madvise(data, bytes, MADV_HUGEPAGE);  // cheaper to touch, protect and unprotect
    poison(data, bytes);
    mapping->second.accessible = true;
    add_allocation({data, bytes, MemoryKind::device, access->location.id, true});
    return CUDA_SUCCESS;
  });
}

// This does not wait; unmapping memory while work uses it is an error here as with the real driver.
CUresult unmap(CUdeviceptr address, std::size_t bytes) {
  return driver_call("cuMemUnmap", [&] {
    Driver& d = driver();
    std::lock_guard lock(d.mutex);
    const auto mapping = d.mappings.find(address);
    if (mapping == d.mappings.end() || mapping->second.bytes != bytes) {
      return wrong("cuMemUnmap: the range is no whole mapping");
    }
    void* data = pointer(address);
    remove_allocation(data);
    close_addresses(data, bytes);
    const auto handle = d.handles.find(mapping->second.handle);
    --handle->second.mappings;
    d.mappings.erase(mapping);
    drop_if_unused(d, handle);
    return CUDA_SUCCESS;
  });
}

CUresult stream_wait_value(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
  return driver_call("cuStreamWaitValue32", [&] {
    if (flags != CU_STREAM_WAIT_VALUE_GEQ) return wrong("cuStreamWaitValue32: only GEQ is emulated");
    if (const std::string why = complaint_about(pointer(address), 4, false); !why.empty()) {
      return wrong("cuStreamWaitValue32: " + why);
    }
    Allocation allocation;
    if (!find(pointer(address), allocation)) return wrong("cuStreamWaitValue32: the word is not pinned");
    const int device = device_of(stream);
    if (device < 0) return wrong("cuStreamWaitValue32: no live stream");
    auto* const word = static_cast<std::uint32_t*>(pointer(address));
    const cudaError_t error = submit(stream, {[=] {
                                                const std::atomic_ref<std::uint32_t> seen(*word);
                                                while (static_cast<std::int32_t>(seen.load() - value) < 0 &&
                                                       sticky_error(device) == cudaSuccess) {
                                                  std::this_thread::sleep_for(std::chrono::microseconds(20));
                                                }
                                              },
                                              false});
    return error == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  });
}

struct Symbol {
  const char* name;
  void* address;
};

template <class Function>
void* address_of(Function* function) {
  return reinterpret_cast<void*>(function);
}

// A source of kernels is a module with one function, which stands for all kernels of the source.
CUresult function_get_module(CUmodule* module, CUfunction function) {
  return driver_call("cuFuncGetModule", [&] {
    *module = reinterpret_cast<CUmodule>(function);
    return CUDA_SUCCESS;
  });
}

CUresult module_get_function_count(unsigned* count, CUmodule) {
  return driver_call("cuModuleGetFunctionCount", [&] {
    *count = 1;
    return CUDA_SUCCESS;
  });
}

CUresult module_enumerate_functions(CUfunction* functions, unsigned count, CUmodule module) {
  return driver_call("cuModuleEnumerateFunctions", [&] {
    if (count != 1) return CUDA_ERROR_INVALID_VALUE;
    functions[0] = reinterpret_cast<CUfunction>(module);
    return CUDA_SUCCESS;
  });
}

CUresult function_load(CUfunction) {
  return driver_call("cuFuncLoad", [] {
    if (load_all_kernels()) drain_device(current_device());  // a first launch waits as well
    return CUDA_SUCCESS;
  });
}

}  // namespace
}  // namespace cuda_emulation

using namespace cuda_emulation;

cudaError_t cudaGetFuncBySymbol(cudaFunction_t* function, const void* symbol) {
  return call("cudaGetFuncBySymbol", [&] {
    if (function == nullptr || symbol == nullptr) return cudaErrorInvalidValue;
    *function = reinterpret_cast<cudaFunction_t>(const_cast<void*>(symbol));
    return cudaSuccess;
  });
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned int,
                                             unsigned long long, cudaDriverEntryPointQueryResult* status) {
  return call("cudaGetDriverEntryPointByVersion", [&] {
    const Symbol symbols[] = {
        {"cuDeviceGetAttribute", address_of(&device_get_attribute)},
        {"cuMemGetAllocationGranularity", address_of(&get_granularity)},
        {"cuMemAddressReserve", address_of(&address_reserve)},
        {"cuMemAddressFree", address_of(&address_free)},
        {"cuMemCreate", address_of(&create)},
        {"cuMemRelease", address_of(&release_handle)},
        {"cuMemMap", address_of(&map)},
        {"cuMemUnmap", address_of(&unmap)},
        {"cuMemSetAccess", address_of(&set_access)},
        {"cuStreamWaitValue32", address_of(&stream_wait_value)},
        {"cuFuncGetModule", address_of(&function_get_module)},
        {"cuModuleGetFunctionCount", address_of(&module_get_function_count)},
        {"cuModuleEnumerateFunctions", address_of(&module_enumerate_functions)},
        {"cuFuncLoad", address_of(&function_load)},
    };
    *function = nullptr;
    if (status != nullptr) *status = cudaDriverEntryPointSymbolNotFound;
    for (const Symbol& known : symbols) {
      if (std::strcmp(known.name, symbol) != 0) continue;
      *function = known.address;
      if (status != nullptr) *status = cudaDriverEntryPointSuccess;
    }
    return cudaSuccess;
  });
}
