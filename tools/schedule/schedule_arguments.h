#pragma once
/// The command line of `tranche schedule`.

#include <cstdint>
#include <optional>
#include <string>

#include "tools/schedule/schedule_check_arguments.h"

namespace CLI {
class App;
}

namespace tranche::tools {

struct ScheduleOptions {
  std::string source;                                 ///< a name, or a file
  std::optional<std::int64_t> stages, micro_batches;  ///< not set: from the file
  std::optional<std::int64_t> chunks;  ///< per rank; not set: from the file, or the schedule's own number
  std::string forward = "1", input = "1", weight = "1";  ///< one time, or one per stage, separated by commas
  std::string write;                                     ///< path for the schedule as text
  bool messages = false;                                 ///< the text includes messages
  bool json = false;
  ScheduleCheckOptions check;  ///< for the subcommand `tranche schedule check`
};

/// Adds the subcommand `schedule`. `options` must outlive parsing.
CLI::App* add_schedule_command(CLI::App& program, ScheduleOptions& options);
/// Throws ConfigurationError for values that were parsed but are invalid.
void check(const ScheduleOptions& options);

}  // namespace tranche::tools
