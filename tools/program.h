#pragma once
#include <string>
#include <vector>

#include "tools/run.h"

namespace tranche::tools {

/// The program: arguments (without its name) in, exit status out (ExitStatus of core/error.h).
int run_program(const std::vector<std::string>& arguments, const Output& output);

}  // namespace tranche::tools
