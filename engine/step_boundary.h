#pragma once
/// The end of a step on the state: the norm of the main gradient, the agreement of the ranks, the update
/// where the state lives, and the gather of new weights. Private to engine/.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/flat_updater.h"
#include "engine/piece_statistics.h"
#include "engine/state_store.h"
#include "engine/step_record.h"
#include "engine/step_scalars.h"
#include "engine/whole_matrices.h"
#include "tranche/device/replay.h"
#include "tranche/partition/mesh.h"

namespace tranche::detail {

/// The buffers in the order in which a step visits their state. With the update at the boundary a rule with
/// sums visits each before its update, and so do buffers of whole matrices.
std::vector<const FlatBuffer*> visits_of_step(const StateStore& store, const Config& config,
                                              const FlatUpdater& updater, const WholeMatrices& matrices);

class StepBoundary {
 public:
  /// All arguments outlive it. `ranks` are those whose gradients make the step.
  StepBoundary(StateStore& store, const Config& config, FlatUpdater& updater, WholeMatrices& matrices,
               Communicator& ranks, const Mesh& mesh, Device& device, const StepScalars& scalars,
               const PieceStatistics& pieces);

  /// Takes the updater's memory; once the store has its own.
  void allocate(MemoryResource& memory);

  /// The result of the exchange, equal on all ranks.
  struct Agreement {
    std::vector<StepRecord> records;  ///< by rank
    double loss_sum = 0;              ///< rounded once
    std::int64_t tokens = 0;
    /// With tranche.gradient_noise_scale: of the gradients that were reduced apart and saw tokens, and the
    /// sum of their squares, each over its tokens; rounded once.
    std::int64_t pieces = 0;
    double squares_of_pieces = 0;
    double sum_of_squares = 0;  ///< of the main gradient, rounded once; infinite where it is not finite
    std::string
        non_finite;  ///< place of the first infinity or NaN of the main gradient; empty: there is none
  };
  /// Collective. Takes the statistics of this rank's share of the main gradient and exchanges them with
  /// `mine`, whose loss, tokens and non-finite position it fills in. `nominal_tokens`: of a micro-batch,
  /// where no kernel writes (the meta device). Waits for the compute stream. Throws CommunicationError naming
  /// a rank that issued other collectives than rank 0 in `step`.
  Agreement agree(StepRecord mine, std::int64_t nominal_tokens, std::int64_t step);

  /// Issues the update of all state, and the gathers of new weights. A skipped step issues the same work,
  /// masked: memory and traffic never depend on data. Collective over each buffer's group, for
  /// rules with sums too.
  void update(const OptimizerStep& step);
  /// The same buffer by buffer, in any order that is the same on all ranks of each group, for rules without
  /// sums and whole matrices. The buffer's gradient is complete behind what was issued.
  void begin_update(const OptimizerStep& step);
  void update(FlatBuffer& flat, const OptimizerStep& step);
  void end_update();
  /// Problems of replaying the update, for the log.
  std::vector<std::string> replay_problems() const;

 private:
  /// The place of the infinity or NaN that a rank has told, in words.
  std::string place_of(const StepRecord& bad, int rank) const;
  /// Adds what this rank counted to its record, and takes the tokens of its micro-batches.
  void count(StepRecord& mine, std::vector<std::int64_t>& tokens);
  void hash_calls(StepRecord& mine) const;
  /// Throws as agree() does.
  void compare_calls(const std::vector<StepRecord>& records, std::int64_t step) const;
  /// Collective: `tokens` are those of this rank's micro-batches.
  void measure_pieces(std::span<const std::int64_t> tokens, Agreement& all);
  void prepare(const OptimizerStep& step);
  /// All updates of offloaded state were issued: begins to gather the new weights.
  void finish_offloaded();
  void update_on_device(FlatBuffer& flat, const OptimizerStep& step);
  /// Updates a buffer whose parameters, or more, live off the device.
  void update_tiles(FlatBuffer& flat, const OptimizerStep& step);

  StateStore& store_;
  const Config& config_;
  FlatUpdater& updater_;
  WholeMatrices& matrices_;
  Communicator& ranks_;
  const Mesh& mesh_;
  Device& device_;
  Stream& compute_;
  const StepScalars& scalars_;
  const PieceStatistics& pieces_;
  std::vector<std::unique_ptr<Replay>> replays_;  ///< by trainable buffer; null: issued anew in every step
};

}  // namespace tranche::detail
