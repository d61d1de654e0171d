#include "bench/google_program.h"

#include <benchmark/benchmark.h>

#include "bench/flags.h"
#include "tranche/core/error.h"

namespace tranche::bench {

int run_google_benchmarks(const char* name, int argc, char** argv, const std::vector<std::string>& own) {
  return run_program(name, [&] {
    benchmark::Initialize(&argc, argv);
    if (argc > 1) {  // Initialize() leaves unknown flags, and its own flags with invalid values
      std::vector<std::string> known{"--benchmark_list_tests",
                                     "--benchmark_filter",
                                     "--benchmark_min_time",
                                     "--benchmark_repetitions",
                                     "--benchmark_enable_random_interleaving",
                                     "--benchmark_report_aggregates_only",
                                     "--benchmark_display_aggregates_only",
                                     "--benchmark_format",
                                     "--benchmark_out",
                                     "--benchmark_out_format",
                                     "--benchmark_color",
                                     "--benchmark_counters_tabular",
                                     "--benchmark_context",
                                     "--benchmark_time_unit"};
      known.insert(known.end(), own.begin(), own.end());
      throw ConfigurationError(unknown_flag(argv[1], known));
    }
    benchmark::RunSpecifiedBenchmarks();
    benchmark::Shutdown();
  });
}

}  // namespace tranche::bench
