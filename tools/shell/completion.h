#pragma once
/// Completion of commands, flags and values by shells.

#include <string>

#include "tools/shell/command_description.h"

namespace tranche::tools {

/// The script that a shell reads: "bash", "zsh" or "fish". Throws ConfigurationError for another one.
std::string completion_script(const DescribedCommand& program, const std::string& shell);

}  // namespace tranche::tools
