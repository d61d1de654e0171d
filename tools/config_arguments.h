#pragma once
/// The command line of `tranche config check`.

#include <cstdint>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace tranche::tools {

struct ConfigCheckOptions {
  std::string path;
  std::int64_t ranks = 0;        ///< 0: derived from the file's batch sizes, else 1
  std::vector<std::string> set;  ///< "key.path=value"
  bool strict = false;           ///< unknown keys are errors, in every section of the file
  bool json = false;
};

/// Adds the subcommand `config` and its subcommands. `options` must outlive parsing.
CLI::App* add_config_command(CLI::App& program, ConfigCheckOptions& options);
/// Throws ConfigurationError for values that were parsed but are invalid.
void check(const ConfigCheckOptions& options);

}  // namespace tranche::tools
