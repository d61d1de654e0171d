#pragma once
/// The command line of `tranche schedule check`.

#include <cstdint>
#include <optional>
#include <string>

namespace CLI {
class App;
}

namespace tranche::tools {

struct ScheduleCheckOptions {
  bool used = false;
  std::string source;                          ///< a file, or a name
  std::int64_t stages = 0, micro_batches = 0;  ///< 0: from the file
  std::int64_t chunks = 0;                     ///< per rank; 0: from the file, or the schedule's own number
  std::string model = "channels";
  std::optional<std::int64_t> activations, buffers, gathered;  ///< the most that a rank may hold
  bool json = false;
};

/// Adds `check` to the subcommand `schedule`. `options` must outlive parsing.
CLI::App* add_schedule_check(CLI::App& schedule, ScheduleCheckOptions& options);
/// Throws ConfigurationError for values that were parsed but are invalid.
void check(const ScheduleCheckOptions& options);

}  // namespace tranche::tools
