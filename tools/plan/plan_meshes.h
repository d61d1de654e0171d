#pragma once
#include <string>

#include "tools/arguments.h"
#include "tools/train/run.h"
#include "tranche/config/config.h"

namespace tranche::tools {

/// `tranche plan --fit SIZE --mesh 'search, AXES'`: as run_plan(). `axes` are the sizes that are given.
int run_mesh_search(const Options& options, const std::string& axes, const Output& output);

/// The command line that trains with `config`, which the search chose for the options: the flags that say
/// what a model and its sequences are, and one for each setting that was searched.
std::string training_command(const Options& options, const Config& config, std::int64_t budget);

}  // namespace tranche::tools
