// Memory-bound kernels on a GPU, each as a fraction of the bandwidth of a device copy.

#include "bench/google_program.h"
#include "bench/memory_bound_kernels.h"
#include "device/cuda_probe.h"

namespace {

using namespace tranche;
using kernels::bench::DeviceBench;

/// Returns null, and gives `state` the reason, if there is no GPU.
DeviceBench* gpu_bench(benchmark::State& state) {
  static const detail::CudaProbe probe = detail::probe_cuda();
  if (probe.devices.empty()) {
    state.SkipWithError(("no GPU: " + probe.problem).c_str());
    return nullptr;
  }
  static auto* const bench = new DeviceBench(DeviceKind::cuda);  // never destroyed, because the driver may be
                                                                 // unloaded before the process ends
  return bench;
}

}  // namespace

int main(int argc, char** argv) {
  constexpr std::int64_t flat = std::int64_t{1} << 27;
  kernels::bench::add_memory_bound_kernels(
      flat, [](const std::string& name, const DeviceBench::Prepare& prepare,
               const kernels::bench::Traffic& traffic) {
        benchmark::RegisterBenchmark(name.c_str(),
                                     [prepare, traffic](benchmark::State& state) {
                                       if (DeviceBench* const bench = gpu_bench(state)) {
                                         bench->run(state, prepare, traffic);
                                       }
                                     })
            ->UseManualTime()
            ->Iterations(1)
            ->Unit(benchmark::kMicrosecond);
      });
  return tranche::bench::run_google_benchmarks("bench_kernels_gpu", argc, argv);
}
