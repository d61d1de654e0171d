#pragma once
/// The few functions of the driver API that are used. They are fetched at run time, because a program linked
/// against the driver does not start on machines without one.

#include <cuda.h>

namespace tranche::cuda {

struct DriverFunctions {
  decltype(&cuDeviceGetAttribute) device_get_attribute = nullptr;
  decltype(&cuMemGetAllocationGranularity) get_granularity = nullptr;
  decltype(&cuMemAddressReserve) address_reserve = nullptr;
  decltype(&cuMemAddressFree) address_free = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  CUresult(CUDAAPI* stream_wait_value)(CUstream, CUdeviceptr, cuuint32_t, unsigned int) = nullptr;
  decltype(&cuFuncGetModule) function_get_module = nullptr;
  decltype(&cuFuncLoad) function_load = nullptr;
  decltype(&cuModuleGetFunctionCount) module_get_function_count = nullptr;
  decltype(&cuModuleEnumerateFunctions) module_enumerate_functions = nullptr;

  /// Fetches the functions that the driver has; the others are null.
  static DriverFunctions fetch();
  /// True when memory can be reserved, created and mapped separately on this GPU.
  bool has_mapping(int gpu) const;
  /// True when all kernels of a module can be named and loaded (CUDA 12.4).
  bool has_enumeration() const {
    return function_get_module != nullptr && function_load != nullptr &&
           module_get_function_count != nullptr && module_enumerate_functions != nullptr;
  }
};

}  // namespace tranche::cuda
