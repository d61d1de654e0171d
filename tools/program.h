#pragma once
#include <string>
#include <vector>

#include "tools/train/run.h"

namespace tranche::tools {

/// The program: arguments (without its name) in, exit status out (ExitStatus of core/error.h). `models` are
/// those that it trains.
int run_program(const std::vector<std::string>& arguments, const Output& output,
                const models::ModelRegistry& models = models::ModelRegistry::with_builtin());

}  // namespace tranche::tools
