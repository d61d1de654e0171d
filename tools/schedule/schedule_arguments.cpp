#include "tools/schedule/schedule_arguments.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <utility>

#include "pipeline/schedule/generators.h"
#include "tranche/core/error.h"

namespace tranche::tools {

CLI::App* add_schedule_command(CLI::App& program, ScheduleOptions& options) {
  CLI::App* command = program.add_subcommand(
      "schedule",
      "a schedule of a pipeline as a chart: its length, idle time and peaks, and how short any could be");
  command->require_subcommand(0, 1);
  command
      ->add_option(
          "schedule", options.source,
          fmt::format("{}, or a file of schedule text (torch's pipeline CSV)", pipeline::schedule_names()))
      ->type_name("SCHEDULE|FILE");
  command->add_option("--p", options.stages, "stages of the pipeline (default: as a file says)");
  command->add_option("--m", options.micro_batches, "micro-batches of a step (default: as a file says)");
  command->add_option("--v", options.chunks,
                      "chunks of the model on a rank (default: as a file says; 2 for interleaved, "
                      "breadth-first and zb-v, else 1)");
  command
      ->add_option(
          "--f", options.forward,
          "time of a rank's forward pass for one micro-batch, over all its chunks; or one for each stage")
      ->type_name("TIME,...")
      ->capture_default_str();
  command->add_option("--i", options.input, "likewise of its input gradients")
      ->type_name("TIME,...")
      ->capture_default_str();
  command->add_option("--w", options.weight, "likewise of its weight gradients")
      ->type_name("TIME,...")
      ->capture_default_str();
  command
      ->add_option("--write", options.write,
                   "write the schedule's compute actions to this file, to be changed and used")
      ->type_name("FILE");
  command->add_flag("--messages", options.messages, "--write also writes sends and receives");
  command->add_flag("--json", options.json, "print the figures as JSON instead of the chart");
  add_schedule_check(*command, options.check);
  command->footer(R"(Examples:
  tranche schedule 1f1b --p 4 --m 8
  tranche schedule zb-v --p 4 --m 8 --f 1 --i 1.2 --w 0.8 --json
  tranche schedule 1f1b --p 4 --m 8 --f 1,2,1,1 --i 1,2,1,1 --w 1,2,1,1    # a slow stage
  tranche schedule zb-h1 --p 4 --m 8 --write mine.csv                      # change it, then:
  tranche schedule mine.csv)");
  return command;
}

void check(const ScheduleOptions& options) {
  if (options.check.used) return check(options.check);
  if (options.source.empty()) {
    throw ConfigurationError(fmt::format(
        "which schedule? there are {}, and files; see tranche schedule --help", pipeline::schedule_names()));
  }
  constexpr std::int64_t most = 1'000'000;
  for (const auto& [flag, value] : {std::pair("--p", options.stages), std::pair("--m", options.micro_batches),
                                    std::pair("--v", options.chunks)}) {
    if (value && (*value < 1 || *value > most))
      throw ConfigurationError(fmt::format("{} is {}, but must be 1 to {}", flag, *value, most));
  }
  if (pipeline::find_schedule(options.source) != nullptr) {
    if (!options.stages) throw ConfigurationError("--p is missing: the number of stages");
    if (!options.micro_batches)
      throw ConfigurationError("--m is missing: the number of micro-batches of a step");
  }
  if (options.messages && options.write.empty()) {
    throw ConfigurationError("--messages says what --write FILE writes; give both");
  }
}

}  // namespace tranche::tools
