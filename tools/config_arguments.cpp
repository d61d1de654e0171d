#include "tools/config_arguments.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "tranche/core/error.h"
#include "tranche/planner/planner.h"

namespace tranche::tools {

CLI::App* add_config_command(CLI::App& program, ConfigCheckOptions& options) {
  CLI::App* command =
      program.add_subcommand("config", "check a configuration file key by key, without a model");
  command->require_subcommand(0, 1);
  CLI::App* check = command->add_subcommand(
      "check",
      "which keys of a DeepSpeed file are honoured, have no effect or are refused; status 2 when any is "
      "refused");
  check->allow_extras()->prefix_command(false);
  check->add_option("file", options.path, "configuration in DeepSpeed's JSON")->type_name("FILE")->required();
  check->add_option("--ranks", options.ranks,
                    "ranks of the run (default: as many as the file's three batch figures say, else 1)");
  check->add_option("--set", options.set, "key.path=value of the configuration; may be repeated")
      ->type_name("KEY=VALUE")
      ->take_all()
      ->allow_extra_args(false);
  check->add_flag("--strict", options.strict, "refuse every key that is not known");
  check->add_flag("--json", options.json, "as JSON (docs/reference/configuration.md)");
  check->footer(R"(Examples:
  tranche config check ds_config.json
  tranche config check ds_config.json --ranks 8 --json)");
  return command;
}

void check(const ConfigCheckOptions& options) {
  if (options.ranks < 0 || options.ranks > planner::most_planned_ranks) {
    throw ConfigurationError(
        fmt::format("--ranks is {}, but must be 1 to {}", options.ranks, planner::most_planned_ranks));
  }
}

}  // namespace tranche::tools
