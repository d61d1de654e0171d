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

/// The buffers in the order in which a step visits their state. A rule with sums visits each buffer once more
/// before all updates, and one of whole matrices is visited before its messages too.
std::vector<const FlatBuffer*> visits_of_step(const StateStore& store, const Config& config,
                                              const FlatUpdater& updater, const WholeMatrices& matrices);

class StepBoundary {
 public:
  /// All arguments must outlive it. `ranks`: all ranks whose gradients the step adds up.
  StepBoundary(StateStore& store, const Config& config, FlatUpdater& updater, WholeMatrices& matrices,
               Communicator& ranks, const Mesh& mesh, Device& device, const StepScalars& scalars,
               const PieceStatistics& pieces);

  /// Allocates the updater's memory. Called once the store has allocated its own.
  void allocate(MemoryResource& memory);

  /// The result of the exchange, equal on all ranks.
  struct Agreement {
    std::vector<StepRecord> records;  ///< by rank
    double loss_sum = 0;              ///< rounded once
    std::int64_t tokens = 0;
    /// With tranche.gradient_noise_scale: the number of gradients that were reduced separately and saw
    /// tokens, and the sum of their squares, each divided by its tokens; rounded once.
    std::int64_t pieces = 0;
    double squares_of_pieces = 0;
    double sum_of_squares = 0;  ///< of the main gradient, rounded once; infinite where it is not finite
    std::string
        non_finite;  ///< place of the first infinity or NaN of the main gradient; empty: there is none
  };
  /// Collective. Adds losses, tokens and the statistics of this rank's share of the main gradient to `mine`,
  /// and exchanges the records of all ranks. `nominal_tokens`: the tokens of a micro-batch on the meta
  /// device, where no kernel counts them. Waits for the compute stream. Throws CommunicationError naming a
  /// rank that issued other collectives than rank 0 in `step`.
  Agreement agree(StepRecord mine, std::int64_t nominal_tokens, std::int64_t step);

  /// Issues the update of all state, and the gathers of new weights. A skipped step issues the same work
  /// without effect, because memory and traffic never depend on data. Collective over each buffer's group,
  /// and with a rule with sums over all ranks.
  void update(const OptimizerStep& step);
  /// The same buffer by buffer (tranche.update: as_reduced), for rules without sums and whole matrices. The
  /// order is the same on all ranks of a group, and each buffer's gradient is complete once the issued work
  /// is done.
  void begin_update(const OptimizerStep& step);
  void update(FlatBuffer& flat, const OptimizerStep& step);
  void end_update();
  /// Problems of replaying the update, for the log.
  std::vector<std::string> replay_problems() const;

 private:
  /// Names the tensor and the element of the infinity or NaN in a rank's record.
  std::string place_of(const StepRecord& bad, int rank) const;
  /// Adds this rank's losses, tokens and gradient statistics to its record. `tokens` receives those of each
  /// micro-batch.
  void count(StepRecord& mine, std::vector<std::int64_t>& tokens);
  void hash_calls(StepRecord& mine) const;
  /// Throws the CommunicationError of agree().
  void compare_calls(const std::vector<StepRecord>& records, std::int64_t step) const;
  /// Collective. Sums the squares of gradients that were reduced separately. `tokens`: of this rank's
  /// micro-batches.
  void measure_pieces(std::span<const std::int64_t> tokens, Agreement& all);
  /// Starts the pass over the disk, and sends the step's numbers to where updates read them. For a rule with
  /// sums it computes these and sends them as well.
  void prepare(const OptimizerStep& step);
  /// Starts the gathers of new weights, once all updates of offloaded state have been issued.
  void finish_offloaded();
  void update_on_device(FlatBuffer& flat, const OptimizerStep& step);
  /// Updates a buffer whose parameters or optimizer state are not on the device.
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
