#pragma once
#include "tools/checkpoint/checkpoint_arguments.h"
#include "tools/train/run.h"

namespace tranche::tools {

/// `tranche generate`: generates text, or token numbers, from a checkpoint or a Hugging Face folder, on the
/// CPU, alone or under mpirun. Rank 0 writes tokens as they come. Returns the exit status.
int run_generate(const Options& options, const Output& output);

}  // namespace tranche::tools
