#pragma once
/// Command lines of Google Benchmark programs.

#include <string>
#include <vector>

namespace tranche::bench {

/// The body of main(): runs all registered benches according to Google Benchmark's flags. Returns the exit
/// status. Other flags are refused as by parse_flags(), except those in `own`, which the caller has already
/// removed.
int run_google_benchmarks(const char* name, int argc, char** argv, const std::vector<std::string>& own = {});

}  // namespace tranche::bench
