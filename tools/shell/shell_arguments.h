#pragma once
/// The command lines of `tranche completion` and `tranche man`.

#include <string>

#include "tranche/models/model_registry.h"

namespace CLI {
class App;
}

namespace tranche::tools {

struct ShellOptions {
  std::string shell;             ///< bash, zsh or fish
  std::string page = "tranche";  ///< name of a manual page
  bool pages = false;            ///< print the names of the pages
  bool used = false;             ///< one of the two commands was given
};

/// Adds the commands `completion` and `man`, of which the help does not show the second: it is for the
/// installation. `options` must outlive parsing.
void add_shell_commands(CLI::App& program, ShellOptions& options);

/// The text to print. It describes all commands of `program`, and proposes the presets of `models`. Throws
/// ConfigurationError for a shell or page that does not exist.
std::string shell_text(const CLI::App& program, const ShellOptions& options,
                       const models::ModelRegistry& models);

}  // namespace tranche::tools
