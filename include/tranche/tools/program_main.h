#pragma once
/// The program `tranche`, for programs with their own models. Link tranche::tools.

#include "tranche/models/model_registry.h"

namespace tranche::tools {

/// Runs all commands of `tranche` (train, evaluate, plan, checkpoint, generate ...), with the models of a
/// registry. Returns the exit status. Call it once, first in main() with its arguments, because for commands
/// that compute it starts the program again in the same process: with GOMP_SPINCOUNT set, unless that or
/// OMP_WAIT_POLICY is already set (docs/reference/troubleshooting.md, "It is slow").
///
///     int main(int argc, char** argv) {
///       auto models = tranche::models::ModelRegistry::with_builtin();
///       models.add(my_architecture());
///       return tranche::tools::program_main(argc, argv, models);
///     }
int program_main(int argc, char** argv, const models::ModelRegistry& models);

}  // namespace tranche::tools
