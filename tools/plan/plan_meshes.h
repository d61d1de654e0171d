#pragma once
#include <string>

#include "tools/arguments.h"
#include "tools/train/run.h"
#include "tranche/config/config.h"

namespace tranche::tools {

/// `tranche plan --fit SIZE --mesh 'search, AXES'`: like run_plan(). `axes` are the given sizes.
int run_mesh_search(const Options& options, const std::string& axes, const Output& output);

/// The command line that trains with `config`, which the search chose for the options: the flags of the model
/// and its sequences, and one flag for each searched setting.
std::string training_command(const Options& options, const Config& config, std::int64_t budget);

}  // namespace tranche::tools
