#pragma once
/// Checkpoints while a program trains.

#include <cstdint>
#include <functional>
#include <string>

#include "tranche/engine/engine.h"

namespace tranche::trainer {

struct CheckpointScheduleOptions {
  std::string folder;           ///< of the run's checkpoints, one that all ranks share; empty: none are saved
  std::int64_t every = 0;       ///< steps between checkpoints; 0: only when save() is called
  std::string user = "{}";      ///< as SaveOptions has it
  int keep_last = 0;            ///< as SaveOptions has it
  std::int64_t keep_every = 0;  ///< as SaveOptions has it
};

/// A checkpoint that became complete.
struct CompletedCheckpoint {
  std::int64_t step = 0;
  std::string path;
  double pause_seconds = 0;  ///< training waited
  double seconds = 0;        ///< from the request to when it was found complete
};

/// Saves every so many steps and when it is told to, one checkpoint at a time, in the background; older ones
/// go as the options say. Without a folder it does nothing. A save that failed is a CheckpointError of the
/// call that follows it, here or of the engine. The engine must outlive it.
class CheckpointSchedule {
 public:
  using Completed = std::function<void(const CompletedCheckpoint&)>;
  /// The engine's present step counts as saved: it is the one that was loaded, or the first. `completed` is
  /// called on the rank that has one, from the calls below.
  CheckpointSchedule(Engine& engine, CheckpointScheduleOptions options, Completed completed = {});

  /// Collective over all ranks, after each step, with its result.
  void after_step(const StepResult& result);
  /// Collective over all ranks, between steps. Begins to save the present step, unless that has been done.
  void save();
  /// Collective over all ranks. Waits until what was begun is complete.
  void finish();
  /// Path of the newest checkpoint that became complete; empty: none since this was made.
  const std::string& newest() const noexcept { return newest_; }

 private:
  void complete(const std::string& path);
  Engine& engine_;
  CheckpointScheduleOptions options_;
  Completed completed_;
  std::int64_t last_step_;  ///< the step that was saved last, or that the run begins with
  CompletedCheckpoint pending_;
  double begun_ = 0;
  std::string newest_;
};

}  // namespace tranche::trainer
