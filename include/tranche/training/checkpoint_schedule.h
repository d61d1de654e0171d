#pragma once
/// Checkpoints while a program trains.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tranche/engine/engine.h"

namespace tranche::training {

struct CheckpointScheduleOptions {
  std::string folder;           ///< of the run's checkpoints, one that all ranks share; empty: none are saved
  std::int64_t every = 0;       ///< steps between checkpoints; 0: only when save() is called
  std::string user = "{}";      ///< as SaveOptions has it
  int keep_last = 0;            ///< as SaveOptions has it
  std::int64_t keep_every = 0;  ///< as SaveOptions has it
  /// A held-out set: the checkpoint of the lowest loss on it is saved and stays, whatever else goes; empty:
  /// none.
  std::string keep_best;
  /// Takes a line for people where a save is put off or what it saves is in doubt; on every rank that has
  /// one.
  std::function<void(const std::string&)> say;
};

/// The loss of one step on a held-out set.
struct Evaluation {
  std::string set;  ///< its name
  EvaluationResult result;
};

/// A checkpoint that became complete.
struct CompletedCheckpoint {
  std::int64_t step = 0;
  std::string path;
  double pause_seconds = 0;  ///< training waited
  double seconds = 0;        ///< from the request to when it was found complete
  bool best = false;         ///< CheckpointScheduleOptions::keep_best: of the lowest loss so far
};

/// The checkpoint of the lowest loss on a held-out set.
struct BestCheckpoint {
  std::string path;
  std::int64_t step = 0;
  std::string set;
  double loss = 0;
};

/// The best of the complete checkpoints in a folder by their losses on `set` (of equal ones the first
/// step), of those that CheckpointSchedule saved after evaluated(). Without a set it is the one by which
/// the newest of them keeps the best. None where no checkpoint has such a loss, or the folder is not there.
/// Not collective. Throws CheckpointError for a folder that cannot be read.
std::optional<BestCheckpoint> best_checkpoint(const std::string& folder, std::string set = {});

/// Saves every so many steps and when it is told to, one checkpoint at a time, in the background; older
/// ones go as the options say. A save that is due behind a skipped step, or while the weights are in doubt
/// (Engine::in_doubt()), waits for the next step that is taken; save() waits for nothing. Without a folder it
/// does nothing. A save that failed is a CheckpointError of
/// the call that follows it, here or of the engine; earlier checkpoints are as before then. The engine must
/// outlive it.
class CheckpointSchedule {
 public:
  using Completed = std::function<void(const CompletedCheckpoint&)>;
  /// Collective over all ranks with `keep_best`, which looks for the best checkpoint in the folder: a run
  /// that goes on goes on from there. The engine's present step counts as saved: it is the one that was
  /// loaded, or the first. `completed` is called on the rank that has one, from the calls below. Throws
  /// CheckpointError for a folder that cannot be read, and InvalidArgument where `user` is no JSON object.
  CheckpointSchedule(Engine& engine, CheckpointScheduleOptions options, Completed completed = {});

  /// Collective over all ranks, between steps. Tells of evaluations of the present step, whose losses its
  /// checkpoint then has in `user`, as "evaluations": {SET: {"loss", "tokens"}}. With `keep_best`, which
  /// must be among them (else InvalidArgument), a loss that is lower than every one before begins a save of
  /// the step, again where it was saved without its losses.
  void evaluated(std::vector<Evaluation> evaluations);
  /// Collective over all ranks, after each step, with its result. `evaluation_follows`: a save that is due
  /// is left to evaluated(), so that the checkpoint has the losses.
  void after_step(const StepResult& result, bool evaluation_follows = false);
  /// Collective over all ranks, between steps. Begins to save the present step, unless that has been done.
  void save();
  /// Collective over all ranks. Waits until what was begun is complete.
  void finish();

  /// Path of the newest checkpoint that became complete; empty: none since this was made.
  const std::string& newest() const noexcept { return newest_; }
  /// With `keep_best`: the best complete checkpoint so far. Equal on all ranks.
  const std::optional<BestCheckpoint>& best() const noexcept { return best_; }

 private:
  bool is_due() const { return owed_ || (options_.every > 0 && engine_.steps() % options_.every == 0); }
  /// Saves what is due, unless it has to wait for a step that is taken.
  void save_if_sound();
  void save_now();
  void save_best();
  void complete(const std::string& path);
  void find_best();
  std::string user() const;
  /// The loss that the present step is the best by; none: it was not evaluated.
  std::optional<double> present_loss() const;

  Engine& engine_;
  CheckpointScheduleOptions options_;
  Completed completed_;
  std::int64_t last_step_;  ///< the step that was saved last, or that the run begins with
  CompletedCheckpoint pending_;
  std::optional<double> pending_loss_;  ///< of the save in progress, or of one that failed
  double begun_ = 0;
  bool owed_ = false;            ///< a save that was due waits for a step that is taken
  bool saved_here_ = false;      ///< a save was begun since this was made
  bool saved_in_doubt_ = false;  ///< the step that was saved last
  std::string newest_;
  std::vector<Evaluation> evaluations_;
  std::int64_t evaluated_step_ = -1;
  std::optional<BestCheckpoint> best_;
};

}  // namespace tranche::training
