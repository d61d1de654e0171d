// Memory-bound kernels on the CPU, compared with two loops on the same threads. of_copy is the fraction of
// the bandwidth of a copy; the lower bound of a call is its bytes over that bandwidth. of_stream is the
// fraction of a loop that reads, writes and updates as many bytes without arithmetic, in alternation with the
// kernel. bench_memory_bound [--small] [Google Benchmark's flags]; with --small operands are tiny and figures
// mean nothing.

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>

#include "bench/google_program.h"
#include "bench/memory_bound_kernels.h"

namespace {

using namespace tranche;
using kernels::bench::DeviceBench;

}  // namespace

int main(int argc, char** argv) {
  char** const end = std::remove_if(argv + 1, argv + argc,
                                    [](const char* word) { return std::strcmp(word, "--small") == 0; });
  const bool small = end != argv + argc;
  argc = static_cast<int>(end - argv);
  constexpr std::int64_t flat = std::int64_t{1} << 24;
  for (const int threads : std::set<int>{1, usable_cores()}) {
    const std::shared_ptr<DeviceBench> bench = std::make_shared<DeviceBench>(DeviceKind::cpu, threads, small);
    kernels::bench::add_memory_bound_kernels(
        flat, [&](const std::string& name, const DeviceBench::Prepare& prepare,
                  const kernels::bench::Traffic& traffic) {
          benchmark::RegisterBenchmark((name + "/threads:" + std::to_string(threads)).c_str(),
                                       [=](benchmark::State& state) { bench->run(state, prepare, traffic); })
              ->UseManualTime()
              ->Iterations(1)
              ->Unit(benchmark::kMicrosecond);
        });
  }
  return tranche::bench::run_google_benchmarks("bench_memory_bound", argc, argv, {"--small"});
}
