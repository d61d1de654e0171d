#pragma once
/// `tranche config check`.

#include <string>

#include "tools/train/run.h"
#include "tranche/config/check.h"

namespace tranche::tools {

inline constexpr const char* config_check_schema = "tranche-config-check-1";

/// The table for people, and the JSON form. `path` is the file as it was given.
std::string config_check_text(const ConfigCheck& check, const std::string& path);
std::string config_check_json(const ConfigCheck& check, const std::string& path);

/// Collective under mpirun; rank 0 prints. Status 2 when any key is refused, or the file is no configuration.
int run_config(const Options& options, const Output& output);

}  // namespace tranche::tools
