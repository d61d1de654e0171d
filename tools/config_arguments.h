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
  std::int64_t ranks = 0;        ///< 0: as many as the file's batch figures say, else 1
  std::vector<std::string> set;  ///< "key.path=value"
  bool strict = false;           ///< unknown keys are errors wherever they stand
  bool json = false;
};

/// Adds the subcommand `config` and its own. `options` must outlive parsing.
CLI::App* add_config_command(CLI::App& program, ConfigCheckOptions& options);
/// Throws ConfigurationError for what was parsed but cannot be.
void check(const ConfigCheckOptions& options);

}  // namespace tranche::tools
