#pragma once
/// Saving while a run trains.

#include <functional>
#include <string>
#include <string_view>

#include "tools/arguments.h"
#include "tools/report.h"
#include "tranche/engine/engine.h"

namespace tranche::tools {

/// Saves at --save-every, on request and at the end; tells of what became complete, on ranks with a `say`.
/// Without --checkpoint-dir it does nothing. A failed save is a CheckpointError of the call that follows it,
/// here or of the engine.
class CheckpointScheduler {
 public:
  using Say = std::function<void(std::string_view line)>;
  /// `user`: what checkpoints say of the run (RunIdentity). `report`: of the rank that writes it, else null.
  CheckpointScheduler(Engine& engine, const Options& options, std::string user, Report* report, Say say);

  /// Collective, after each step.
  void after_step(const StepResult& result);
  /// Collective. Begins to save the present step, unless that has been done.
  void save();
  /// Collective. Waits until what was begun is complete.
  void finish();
  /// Path of the newest checkpoint that became complete; empty: none in this run.
  const std::string& newest() const noexcept { return newest_; }

 private:
  void completed(const std::string& path);
  Engine& engine_;
  const Options& options_;
  std::string user_;
  Report* report_;
  Say say_;
  std::int64_t last_step_;  ///< the step that was saved last, or that the run begins with
  CheckpointRecord pending_;
  double begun_ = 0;
  std::string newest_;
};

/// "3 ms", "1.24 s".
std::string format_pause(double seconds);

}  // namespace tranche::tools
