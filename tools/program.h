#pragma once
#include <string>
#include <vector>

#include "tools/train/run.h"

namespace tranche::tools {

/// Runs the program: arguments (without its name) in, exit status out (ExitStatus of core/error.h). `models`
/// are those that it can train.
int run_program(const std::vector<std::string>& arguments, const Output& output,
                const models::ModelRegistry& models = models::ModelRegistry::with_builtin());

}  // namespace tranche::tools
