#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "tranche/data/sampler.h"
#include "tranche/device/memory.h"
#include "tranche/engine/engine.h"
#include "tranche/models/language_model.h"

namespace tranche::tools {

/// Device memory for the micro-batches of a run, and its filling.
class BatchFeeder {
 public:
  /// With `documents` batches tell where the documents of a row begin.
  BatchFeeder(Engine& engine, std::int64_t vocabulary, const data::BatchShape& shape, std::int64_t sequence,
              bool documents = false);
  /// Reads windows (sampler.h) into device memory; `samples` are their global numbers. Valid until the next
  /// call.
  models::TokenBatch fill(const data::Windows& windows, const std::vector<std::int64_t>& numbers,
                          std::vector<std::int64_t> samples);
  const data::BatchShape& shape() const noexcept { return shape_; }

 private:
  Engine& engine_;
  data::BatchShape shape_;
  std::int64_t vocabulary_;
  std::int64_t sequence_;
  Buffer device_tokens_, device_targets_;
  Buffer device_begin_, device_positions_;  ///< with documents
  /// Used if host code cannot reach the device: memory that is copied from behind the host's back, one place
  /// for each micro-batch of a step and one more, so that no step waits for a place.
  Buffer staging_;
  std::vector<Event> staged_;  ///< by place: its last copy is done
  std::size_t place_ = 0;
  std::vector<std::int32_t> tokens_, targets_;
  data::RowDocuments documents_;
  std::vector<std::int64_t> samples_;
};

/// Called on every rank with the windows that were begun, before the first and after each round of all ranks.
using EvaluationProgress = std::function<void(std::int64_t done, std::int64_t windows)>;

/// Collective. Mean loss in nats a token over the windows `numbers`, spread over the ranks; the sum's order
/// depends on the number of ranks only.
EvaluationResult evaluate_windows(Engine& engine, const models::LanguageModel& model, BatchFeeder& feeder,
                                  const data::Windows& windows, const std::vector<std::int64_t>& numbers,
                                  const EvaluationProgress& progress = {});

/// Collective. Continues `prompt` by `count` bytes drawn from the model at a temperature, the draws keyed by
/// seed: every rank returns the same. The model sees the last `context` bytes: as many as it was trained on,
/// since positions beyond have no trained embedding.
std::string sample_text(Engine& engine, const models::LanguageModel& model, std::string_view prompt,
                        std::int64_t count, std::int64_t context, double temperature, std::uint64_t seed);

}  // namespace tranche::tools
