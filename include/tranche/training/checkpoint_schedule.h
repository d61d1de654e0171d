#pragma once
/// Saves checkpoints while a program trains.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tranche/engine/engine.h"

namespace tranche::training {

struct CheckpointScheduleOptions {
  std::string folder;           ///< of the run's checkpoints, shared by all ranks; empty: none are saved
  std::int64_t every = 0;       ///< steps between checkpoints; 0: only when save() is called
  std::string user = "{}";      ///< as in SaveOptions
  int keep_last = 0;            ///< as in SaveOptions
  std::int64_t keep_every = 0;  ///< as in SaveOptions
  /// A held-out set: the checkpoint with the lowest loss on it is saved and kept, whichever others are
  /// removed; empty: none.
  std::string keep_best;
  /// Receives a line for people when a save is postponed, or saves weights in doubt; called on every rank
  /// that sets it.
  std::function<void(const std::string&)> say;
};

/// The loss of one step on a held-out set.
struct Evaluation {
  std::string set;  ///< its name
  EvaluationResult result;
  /// A digest of the evaluated windows; 0: not known. Losses on other data are not compared.
  std::uint64_t data = 0;
};

/// A checkpoint that became complete.
struct CompletedCheckpoint {
  std::int64_t step = 0;
  std::string path;
  double pause_seconds = 0;  ///< time for which training waited
  double seconds = 0;        ///< from the request until it was seen to be complete
  bool best = false;         ///< CheckpointScheduleOptions::keep_best: it has the lowest loss so far
};

/// The checkpoint of the lowest loss on a held-out set.
struct BestCheckpoint {
  std::string path;
  std::int64_t step = 0;
  std::string set;
  double loss = 0;
  std::int64_t tokens = 0;  ///< that the loss is over
  std::uint64_t data = 0;   ///< as in Evaluation
};

/// The best of the complete checkpoints in a folder by their losses on `set` (the earliest step if equal),
/// among those that CheckpointSchedule saved after evaluated() on the same windows as the newest. Without a
/// set, the set is the one for which the newest of them keeps the best. nullopt if no checkpoint has such a
/// loss, or the folder does not exist. Not collective. Throws CheckpointError for a folder that cannot be
/// read.
std::optional<BestCheckpoint> best_checkpoint(const std::string& folder, std::string set = {});

/// Saves every so many steps and when save() is called, one checkpoint at a time, in the background; older
/// ones are removed according to the options. A save that is due after a skipped step, or while the weights
/// are in doubt (Engine::in_doubt()), is postponed to the next step that is applied; save() is not. Without a
/// folder it does nothing. A failed save throws CheckpointError from the next call, here or of the engine;
/// earlier checkpoints are unchanged then. The engine must outlive it.
///
///     due --step applied, weights sound--> in progress --finish() or a later call--> complete
///     due --step skipped, or weights in doubt--> owed --next applied step--> in progress
///     in progress --failure--> the next call throws
class CheckpointSchedule {
 public:
  using Completed = std::function<void(const CompletedCheckpoint&)>;
  /// Collective over all ranks with `keep_best`, which finds the best checkpoint in the folder, so that a
  /// resumed run continues from that record. The engine's present step counts as saved: it was loaded, or is
  /// the first. The calls below call `completed` on the rank that has one. Throws CheckpointError for a
  /// folder that cannot be read, and InvalidArgument if `user` is not a JSON object.
  CheckpointSchedule(Engine& engine, CheckpointScheduleOptions options, Completed completed = {});

  /// Collective over all ranks, between steps. Records evaluations of the present step; its checkpoint then
  /// has their losses in `user`, as "evaluations": {SET: {"loss", "tokens", "data"}}. With `keep_best`, which
  /// must be among them (else InvalidArgument), a loss lower than all earlier ones starts a save of the step,
  /// even if it was already saved without its losses. A best checkpoint by other windows, which have other
  /// `data` or another number of tokens, is not compared, and the options' `say` receives a line about it.
  void evaluated(std::vector<Evaluation> evaluations);
  /// Collective over all ranks, after each step, with its result. `evaluation_follows`: a due save is left to
  /// evaluated(), so that the checkpoint has the losses.
  void after_step(const StepResult& result, bool evaluation_follows = false);
  /// Collective over all ranks, between steps. Starts to save the present step, unless that was done already.
  /// With `validation_due` the checkpoint says that an evaluation of the step is still to be made, and the
  /// step is saved again if it was saved without that.
  void save(bool validation_due = false);
  /// True if `user` of a checkpoint says so.
  static bool validation_due(const std::string& user);
  /// Collective over all ranks. Waits until a started save is complete.
  void finish();

  /// The path of the newest checkpoint that became complete; empty: none since this object was made.
  const std::string& newest() const noexcept { return newest_; }
  /// With `keep_best`: the best complete checkpoint so far. Equal on all ranks.
  const std::optional<BestCheckpoint>& best() const noexcept { return best_; }

 private:
  bool is_due() const { return owed_ || (options_.every > 0 && engine_.steps() % options_.every == 0); }
  /// Saves if a save is due, unless it must wait for an applied step.
  void save_if_sound();
  void save_now(bool validation_due = false);
  void save_best();
  void complete(const std::string& path);
  void find_best();
  std::string user(bool validation_due) const;
  /// The present step as the best one, without a path; nullopt: it has no finite loss.
  std::optional<BestCheckpoint> present() const;

  Engine& engine_;
  CheckpointScheduleOptions options_;
  Completed completed_;
  std::int64_t last_step_;  ///< the step that was saved last, or the run's first
  CompletedCheckpoint pending_;
  std::optional<BestCheckpoint> pending_best_;  ///< of the save in progress, or of a failed one
  double begun_ = 0;
  bool owed_ = false;            ///< a due save waits for an applied step
  bool saved_here_ = false;      ///< a save was started since this object was made
  bool saved_in_doubt_ = false;  ///< for the step that was saved last
  std::string newest_;
  std::vector<Evaluation> evaluations_;
  std::int64_t evaluated_step_ = -1;
  std::optional<BestCheckpoint> best_;
};

}  // namespace tranche::training
