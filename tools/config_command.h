#pragma once
/// `tranche config check`.

#include <string>

#include "tools/train/run.h"
#include "tranche/config/check.h"

namespace tranche::tools {

inline constexpr const char* config_check_schema = "tranche-config-check-1";

/// The table for people, and the JSON form. `path` is the file's path as given.
std::string config_check_text(const ConfigCheck& check, const std::string& path);
std::string config_check_json(const ConfigCheck& check, const std::string& path);

/// Collective under mpirun; rank 0 prints. The status is 2 when any key is refused, or the file is not a
/// configuration.
int run_config(const Options& options, const Output& output);

}  // namespace tranche::tools
