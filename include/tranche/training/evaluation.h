#pragma once
/// The loss on held-out windows.

#include <cstdint>
#include <functional>
#include <vector>

#include "tranche/training/batch_feeder.h"

namespace tranche::training {

/// Called on every rank with the number of windows started, before the first round of all ranks and after
/// each.
using EvaluationProgress = std::function<void(std::int64_t done, std::int64_t windows)>;
/// Called on every rank before each round; all ranks return the same.
using EvaluationStop = std::function<bool()>;

/// The mean loss in nats per token of the windows `numbers`, NaN if none of them has a target
/// (training::has_target()). The windows are distributed over the ranks, without dropout; the sum's order
/// depends only on the number of ranks and the feeder's micro-batch, and the training's state does not
/// change. Once `stop` returns true, the evaluation ends with the mean over the rounds so far. Collective
/// over all ranks, between steps, with the same arguments. Every rank returns the same. Throws the errors of
/// BatchFeeder::fill() and Engine::end_evaluation().
EvaluationResult evaluate_windows(Engine& engine, const models::LanguageModel& model, BatchFeeder& feeder,
                                  const training::Windows& windows, const std::vector<std::int64_t>& numbers,
                                  const EvaluationProgress& progress = {}, const EvaluationStop& stop = {});

}  // namespace tranche::training
