#include "device/cuda/cuda_modules.h"

#include <cuda_runtime_api.h>

#include <memory>
#include <new>

#include "device/cuda/cuda_driver.h"

namespace tranche::cuda {
namespace {

// Filled before main() and when libraries are loaded, each by one thread; constant afterwards.
constinit const KernelSource* newest = nullptr;

// A failure here does not fail the program, because CUDA loads the kernel at its first launch anyway.
void load_source(const DriverFunctions& driver, const void* kernel) noexcept {
  cudaFunction_t function = nullptr;
  if (cudaGetFuncBySymbol(&function, kernel) != cudaSuccess) {
    cudaGetLastError();
    return;
  }
  if (!driver.has_enumeration()) return;
  CUmodule module = nullptr;
  unsigned count = 0;
  if (driver.function_get_module(&module, function) != CUDA_SUCCESS ||
      driver.module_get_function_count(&count, module) != CUDA_SUCCESS) {
    return;
  }
  const std::unique_ptr<CUfunction[]> functions(new (std::nothrow) CUfunction[count]);
  if (functions == nullptr ||
      driver.module_enumerate_functions(functions.get(), count, module) != CUDA_SUCCESS) {
    return;
  }
  for (unsigned i = 0; i < count; ++i) static_cast<void>(driver.function_load(functions[i]));
}

}  // namespace

KernelSource::KernelSource(const void* kernel) noexcept : kernel_(kernel), next_(newest) {
  newest = this;
}

const KernelSource* KernelSource::first() noexcept {
  return newest;
}

void load_kernels(const DriverFunctions& driver) noexcept {
  for (const KernelSource* source = newest; source != nullptr; source = source->next()) {
    load_source(driver, source->kernel());
  }
}

}  // namespace tranche::cuda
