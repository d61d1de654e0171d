#include "tools/schedule/schedule_check_arguments.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <utility>

#include "pipeline/schedule/check.h"
#include "tranche/core/error.h"

namespace tranche::tools {

CLI::App* add_schedule_check(CLI::App& schedule, ScheduleCheckOptions& options) {
  CLI::App* command = schedule.add_subcommand(
      "check", "prove that a schedule is complete, causal and free of deadlock; status 2 when it is not");
  command->allow_extras()->prefix_command(false);
  command->parse_complete_callback([&options] { options.used = true; });
  command->add_option("schedule", options.source, "a file of schedule text, or a name (with --p and --m)")
      ->type_name("SCHEDULE|FILE")
      ->required();
  command
      ->add_option("--model", options.model,
                   "how messages behave: async (a send waits for nothing), channels (a queue for each "
                   "sender, receiver and "
                   "kind of message, as devices have) or stream (one queue for all messages of a rank)")
      ->type_name("async|channels|stream")
      ->capture_default_str();
  command->add_option("--p", options.stages, "stages that the schedule has to have");
  command->add_option("--m", options.micro_batches, "micro-batches that it has to have");
  command->add_option("--v", options.chunks, "chunks of the model on a rank that it has to have");
  command->add_option("--activations", options.activations,
                      "the most pairs of chunk and micro-batch open on a rank");
  command->add_option("--buffers", options.buffers,
                      "the most messages that a rank has received and not read");
  command->add_option("--gathered", options.gathered, "the most chunks whose weights are gathered on a rank");
  command->add_flag("--json", options.json, "print the verdict as JSON");
  command->footer(R"(Examples:
  tranche schedule check mine.csv
  tranche schedule check mine.csv --model stream --activations 4
  tranche schedule check zb-v --p 4 --m 8 --json)");
  return command;
}

void check(const ScheduleCheckOptions& options) {
  constexpr std::int64_t most = 1'000'000;
  for (const auto& [flag, value] : {std::pair("--p", options.stages), std::pair("--m", options.micro_batches),
                                    std::pair("--v", options.chunks)}) {
    if (value < 0 || value > most)
      throw ConfigurationError(fmt::format("{} is {}, but must be 1 to {}", flag, value, most));
  }
  for (const auto& [flag, value] :
       {std::pair("--activations", options.activations), std::pair("--buffers", options.buffers),
        std::pair("--gathered", options.gathered)}) {
    if (value && *value < 0)
      throw ConfigurationError(fmt::format("{} is {}, but must be 0 or more", flag, *value));
  }
  try {
    (void)pipeline::message_model_named(options.model);
  } catch (const ConfigurationError& error) {
    throw ConfigurationError("--model: " + error.message());
  }
}

}  // namespace tranche::tools
