#pragma once
/// Makes the ranks of an engine agree at its start. Private to engine/.

#include <functional>
#include <string>

#include "engine/stages.h"
#include "tranche/engine/runtime.h"
#include "tranche/optim/optimizer.h"

namespace tranche::detail {

/// Throws ConfigurationError, on all ranks, naming a rank that was started with another version,
/// configuration, optimizer, schedule, model or numerics than rank 0. `schedule` describes the program's own
/// schedule. Returns GradientReducer::reduction_group() for all ranks. Collective.
int agree_on_start(const Runtime& runtime, const Config& config, const ModelSpec& model, const Stages& stages,
                   const Optimizer& optimizer, const std::string& schedule);

/// Runs `work`. Throws OutOfMemory on all ranks if it ran out of memory on any; `advice` is appended to that
/// rank's message. Collective.
void allocate_on_all(const Runtime& runtime, const std::function<void()>& work,
                     const std::function<std::string()>& advice);

}  // namespace tranche::detail
