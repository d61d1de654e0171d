#pragma once
/// Micro-batches of token sequences in device memory.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tranche/device/event.h"
#include "tranche/device/memory.h"
#include "tranche/engine/engine.h"
#include "tranche/models/language_model.h"
#include "tranche/training/sampler.h"

namespace tranche::training {

/// Owns one rank's device memory for micro-batches, and fills it from token files. The engine must outlive
/// it.
class BatchFeeder {
 public:
  /// Allocates device memory for `shape.micro_batch` rows of `sequence` tokens and as many targets, 4 bytes
  /// each; with `documents` twice as much, for batches with the document starts of each row. On a mesh with a
  /// pipeline, where several micro-batches are open at once, it allocates this for each micro-batch of a
  /// step. If host code cannot access the device it also allocates host memory for the micro-batches of a
  /// step and one more. `vocabulary` is the model's; larger tokens are refused when they are read. Throws
  /// OutOfMemory.
  BatchFeeder(Engine& engine, std::int64_t vocabulary, const training::BatchShape& shape,
              std::int64_t sequence, bool documents = false);

  /// This rank's micro-batch `number` (from 0) of the engine's next step: the samples after those already
  /// seen (Engine::samples()), from the windows that `mixture` assigns to them. Not collective. The batch is
  /// filled by work on the compute stream, and valid until the next call; on a mesh with a pipeline, for as
  /// many calls as a step has micro-batches. Throws ConfigurationError, naming the file, if it cannot be read
  /// or holds a token beyond the vocabulary.
  models::TokenBatch training_batch(const training::Windows& windows, const training::Mixture& mixture,
                                    std::int64_t number);
  /// The same for the windows `numbers` (-1: a row without targets), at most `shape.micro_batch` of them;
  /// `samples` are their global numbers, which key dropout.
  models::TokenBatch fill(const training::Windows& windows, const std::vector<std::int64_t>& numbers,
                          std::vector<std::int64_t> samples);

  const training::BatchShape& shape() const noexcept { return shape_; }
  std::int64_t sequence() const noexcept { return sequence_; }

 private:
  Engine& engine_;
  training::BatchShape shape_;
  std::int64_t vocabulary_;
  std::int64_t sequence_;
  struct Place {
    Buffer tokens, targets;
    Buffer begin, positions;  ///< with documents
    std::vector<std::int64_t> samples;
  };
  void take(Place& place, std::int64_t bytes);
  std::vector<Place> places_;  ///< used in turn
  std::size_t next_ = 0;
  bool documents_wanted_;
  /// Used if host code cannot access the device: the source of asynchronous copies. It has one place for each
  /// micro-batch of a step and one more, so that no step waits for a place.
  Buffer staging_;
  std::vector<Event> staged_;  ///< by place: the end of its last copy
  std::size_t place_ = 0;
  std::vector<std::int32_t> tokens_, targets_;
  training::RowDocuments documents_;
};

}  // namespace tranche::training
