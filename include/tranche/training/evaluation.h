#pragma once
/// Loss on held-out windows.

#include <cstdint>
#include <functional>
#include <vector>

#include "tranche/training/batch_feeder.h"

namespace tranche::training {

/// Called on every rank with the windows that were begun, before the first and after each round of all ranks.
using EvaluationProgress = std::function<void(std::int64_t done, std::int64_t windows)>;

/// Mean loss in nats a token of the windows `numbers`, NaN where none of them has a target
/// (training::has_target()), spread over the ranks, without dropout; the sum's order depends on the number of
/// ranks and on the feeder's micro-batch only, and the training's state stays as it is. Collective over all
/// ranks, between steps, with the same arguments. Every rank returns the same. Throws what
/// BatchFeeder::fill() and Engine::end_evaluation() throw.
EvaluationResult evaluate_windows(Engine& engine, const models::LanguageModel& model, BatchFeeder& feeder,
                                  const training::Windows& windows, const std::vector<std::int64_t>& numbers,
                                  const EvaluationProgress& progress = {});

}  // namespace tranche::training
