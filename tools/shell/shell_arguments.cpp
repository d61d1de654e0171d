#include "tools/shell/shell_arguments.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>

#include "config/keys.h"
#include "pipeline/schedule/generators.h"
#include "planner/machine_files.h"
#include "tools/shell/completion.h"
#include "tools/shell/man_page.h"
#include "tranche/partition/mesh.h"
#include "tranche/version.h"

namespace tranche::tools {

namespace {

/// The words of the types that --help writes in capitals.
Vocabulary vocabulary_of(const models::ModelRegistry& models) {
  Vocabulary vocabulary{{"PRESET", models.preset_names()}};
  for (const auto& schedule : pipeline::named_schedules()) vocabulary["SCHEDULE"].emplace_back(schedule.name);
  for (const auto& machine : planner::machine_files()) vocabulary["MACHINE"].emplace_back(machine.name);
  for (int axis = 0; axis < mesh_axes; ++axis)
    vocabulary["AXES"].push_back(fmt::format("{}=", name_of(static_cast<MeshAxis>(axis))));
  for (const detail::ConfigKey& key : detail::configuration_keys()) {
    const bool has_value =
        key.key_class == detail::KeyClass::honoured && key.kind != detail::ValueKind::block;
    if (has_value && key.path.find("[]") == std::string_view::npos)
      vocabulary["KEY=VALUE"].push_back(fmt::format("{}=", key.path));
  }
  return vocabulary;
}

}  // namespace

void add_shell_commands(CLI::App& program, ShellOptions& options) {
  CLI::App* completion =
      program.add_subcommand("completion", "print the completion of commands, flags and values for a shell");
  completion->add_option("shell", options.shell, "bash, zsh or fish")->type_name("bash|zsh|fish")->required();
  completion->footer(R"(Examples:
  source <(tranche completion bash)          # for this shell; an installation brings it along
  tranche completion fish | source)");
  CLI::App* man = program.add_subcommand("man", "print a manual page")->group("");
  man->add_option("page", options.page, "name of the page");
  man->add_flag("--list", options.pages, "print the names of all pages");
  for (CLI::App* command : {completion, man}) {
    command->allow_extras()->prefix_command(false);
    command->parse_complete_callback([&options] { options.used = true; });
  }
}

std::string shell_text(const CLI::App& program, const ShellOptions& options,
                       const models::ModelRegistry& models) {
  const DescribedCommand described = describe(program, vocabulary_of(models));
  if (!options.shell.empty()) return completion_script(described, options.shell);
  if (options.pages) return fmt::format("{}\n", fmt::join(man_page_names(described), "\n"));
  return man_page(described, options.page, std::string(version));
}

}  // namespace tranche::tools
