#pragma once
/// Command lines of programs of Google Benchmark.

#include <string>
#include <vector>

namespace tranche::bench {

/// The body of main(): runs all registered benches, by Google Benchmark's flags; the exit status. A flag that
/// is neither Google Benchmark's nor taken out before is refused as by parse_flags(), `own` being those taken
/// out.
int run_google_benchmarks(const char* name, int argc, char** argv, const std::vector<std::string>& own = {});

}  // namespace tranche::bench
