#include "tranche/training/evaluation.h"

#include <algorithm>

#include "tranche/core/shape.h"

namespace tranche::training {

EvaluationResult evaluate_windows(Engine& engine, const models::LanguageModel& model, BatchFeeder& feeder,
                                  const training::Windows& windows, const std::vector<std::int64_t>& numbers,
                                  const EvaluationProgress& progress, const EvaluationStop& stop) {
  const std::int64_t ranks = feeder.shape().ranks,
                     rank = engine.runtime().mesh().data_rank(engine.runtime().rank());
  const std::int64_t micro_batch = feeder.shape().micro_batch;
  const auto count = static_cast<std::int64_t>(numbers.size());
  const std::int64_t rounds = divide_round_up(count, ranks * micro_batch);
  engine.begin_evaluation();
  if (progress) progress(0, count);
  for (std::int64_t round = 0; round < rounds && !(stop && stop()); ++round) {
    std::vector<std::int64_t> mine(static_cast<std::size_t>(micro_batch));
    for (std::int64_t i = 0; i < micro_batch; ++i) {
      // Slots beyond the end are rows without targets, so that all ranks make the same calls.
      const std::int64_t slot = (round * ranks + rank) * micro_batch + i;
      mine[static_cast<std::size_t>(i)] = slot < count ? numbers[static_cast<std::size_t>(slot)] : -1;
    }
    model.evaluate(engine, feeder.fill(windows, mine, mine));
    if (progress) progress(std::min(count, (round + 1) * ranks * micro_batch), count);
  }
  return engine.end_evaluation();
}

}  // namespace tranche::training
