#include "device/cuda/cuda_modules.h"

#include <cuda_runtime_api.h>

#include <mutex>
#include <set>
#include <vector>

#include "device/cuda/cuda_driver.h"

namespace tranche::cuda {
namespace {

// Filled before main() and when libraries are loaded, each of which happens in one thread.
constinit const KernelSource* newest = nullptr;

struct Ranks {
  std::mutex mutex;
  std::multiset<int> gpus;  // of the devices that live
  std::set<int> loaded;     // GPUs whose kernels are
};
Ranks& ranks() {
  static Ranks& instance = *new Ranks;  // devices may be static objects
  return instance;
}

// A failure here does not fail the program, because CUDA loads the kernel at its first launch anyway.
void load_all(const DriverFunctions& driver, const void* kernel) {
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
  std::vector<CUfunction> functions(count);
  if (driver.module_enumerate_functions(functions.data(), count, module) != CUDA_SUCCESS) return;
  for (CUfunction one : functions) static_cast<void>(driver.function_load(one));
}

}  // namespace

KernelSource::KernelSource(const void* kernel) noexcept : kernel_(kernel), next_(newest) {
  newest = this;
}

const KernelSource* KernelSource::first() noexcept {
  return newest;
}

KernelsOfRanks::KernelsOfRanks(int gpu) : gpu_(gpu) {
  Ranks& of = ranks();
  std::lock_guard lock(of.mutex);
  of.gpus.insert(gpu);
  if (of.gpus.size() < 2) return;
  const DriverFunctions driver = DriverFunctions::fetch();
  int before = 0;
  if (cudaGetDevice(&before) != cudaSuccess) cudaGetLastError();
  for (const int used : std::set<int>(of.gpus.begin(), of.gpus.end())) {
    if (!of.loaded.insert(used).second) continue;
    if (cudaSetDevice(used) != cudaSuccess) {
      cudaGetLastError();
      continue;
    }
    for (const KernelSource* source = newest; source != nullptr; source = source->next()) {
      load_all(driver, source->kernel());
    }
  }
  if (cudaSetDevice(before) != cudaSuccess) cudaGetLastError();
}

KernelsOfRanks::~KernelsOfRanks() {
  Ranks& of = ranks();
  std::lock_guard lock(of.mutex);
  of.gpus.erase(of.gpus.find(gpu_));
}

}  // namespace tranche::cuda
