#pragma once
/// The command line of `tranche schedule`.

#include <cstdint>
#include <string>

#include "tools/schedule/schedule_check_arguments.h"

namespace CLI {
class App;
}

namespace tranche::tools {

struct ScheduleOptions {
  std::string source;                          ///< a name, or a file
  std::int64_t stages = 0, micro_batches = 0;  ///< 0: as the file says
  std::int64_t chunks = 0;  ///< on a rank; 0: as the file says, or the schedule's own number
  std::string forward = "1", input = "1", weight = "1";  ///< one time, or one for each stage with commas
  std::string write;                                     ///< path for the schedule as text
  bool messages = false;                                 ///< the text has messages too
  bool json = false;
  ScheduleCheckOptions check;  ///< the subcommand `tranche schedule check`
};

/// Adds the subcommand `schedule`. `options` must outlive parsing.
CLI::App* add_schedule_command(CLI::App& program, ScheduleOptions& options);
/// Throws ConfigurationError for what was parsed but cannot be.
void check(const ScheduleOptions& options);

}  // namespace tranche::tools
