#include "device/cuda/cuda_driver.h"

#include <cuda_runtime_api.h>

namespace tranche::cuda {
namespace {

template <typename Function>
void find(const char* symbol, Function& function, unsigned version = 12000) {
  // Requests the versions of these functions of CUDA 12.0, or of the given version; later drivers keep them.
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(symbol, &address, version, cudaEnableDefault, &found);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return;
  }
  if (found == cudaDriverEntryPointSuccess) function = reinterpret_cast<Function>(address);
}

}  // namespace

DriverFunctions DriverFunctions::fetch() {
  DriverFunctions functions;
  find("cuDeviceGetAttribute", functions.device_get_attribute);
  find("cuMemGetAllocationGranularity", functions.get_granularity);
  find("cuMemAddressReserve", functions.address_reserve);
  find("cuMemAddressFree", functions.address_free);
  find("cuMemCreate", functions.create);
  find("cuMemRelease", functions.release);
  find("cuMemMap", functions.map);
  find("cuMemUnmap", functions.unmap);
  find("cuMemSetAccess", functions.set_access);
  find("cuStreamWaitValue32", functions.stream_wait_value);
  find("cuFuncGetModule", functions.function_get_module);
  find("cuFuncLoad", functions.function_load, 12040);
  find("cuModuleGetFunctionCount", functions.module_get_function_count, 12040);
  find("cuModuleEnumerateFunctions", functions.module_enumerate_functions, 12040);
  return functions;
}

bool DriverFunctions::has_mapping(int gpu) const {
  const bool complete = get_granularity != nullptr && address_reserve != nullptr && address_free != nullptr &&
                        create != nullptr && release != nullptr && map != nullptr && unmap != nullptr &&
                        set_access != nullptr;
  if (!complete) return false;
  int supported = 1;
  if (device_get_attribute != nullptr &&
      device_get_attribute(&supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, gpu) !=
          CUDA_SUCCESS) {
    return false;
  }
  return supported != 0;
}

}  // namespace tranche::cuda
