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

/// Device memory for the micro-batches of one rank, and its filling from token files. The engine must outlive
/// it.
class BatchFeeder {
 public:
  /// Takes device memory for `shape.micro_batch` rows of `sequence` tokens and as many targets, 4 bytes each;
  /// with `documents` as much again, for batches that tell where the documents of a row begin. On a mesh with
  /// a pipeline, where several micro-batches are open at once, it takes that for each micro-batch of a step.
  /// Where host code cannot reach the device it also takes host memory for the micro-batches of a step and
  /// one more.
  /// `vocabulary` is the model's; tokens beyond it are refused as they are read. Throws OutOfMemory.
  BatchFeeder(Engine& engine, std::int64_t vocabulary, const training::BatchShape& shape,
              std::int64_t sequence, bool documents = false);

  /// This rank's micro-batch `number` (from 0) of the step that the engine takes next: the samples behind
  /// those that were seen (Engine::samples()), from the windows that `mixture` gives them. Not collective.
  /// The batch is filled by work on the compute stream, and valid until the next call; on a mesh with a
  /// pipeline, for as many calls as a step has micro-batches. Throws
  /// ConfigurationError, naming the file, where it cannot be read or holds a token beyond the vocabulary.
  models::TokenBatch training_batch(const training::Windows& windows, const training::Mixture& mixture,
                                    std::int64_t number);
  /// The same of the windows `numbers` (-1: a row without targets), of which there are at most
  /// `shape.micro_batch`; `samples` are their global numbers, which key dropout.
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
  std::vector<Place> places_;  ///< taken in turn
  std::size_t next_ = 0;
  bool documents_wanted_;
  /// Used if host code cannot reach the device: memory that is copied from behind the host's back, one place
  /// for each micro-batch of a step and one more, so that no step waits for a place.
  Buffer staging_;
  std::vector<Event> staged_;  ///< by place: its last copy is done
  std::size_t place_ = 0;
  std::vector<std::int32_t> tokens_, targets_;
  training::RowDocuments documents_;
};

}  // namespace tranche::training
