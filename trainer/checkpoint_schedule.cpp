#include "tranche/trainer/checkpoint_schedule.h"

#include <utility>

#include "core/clock.h"

namespace tranche::trainer {

CheckpointSchedule::CheckpointSchedule(Engine& engine, CheckpointScheduleOptions options, Completed completed)
    : engine_(engine),
      options_(std::move(options)),
      completed_(std::move(completed)),
      last_step_(engine.steps()) {}

void CheckpointSchedule::after_step(const StepResult& result) {
  if (options_.folder.empty()) return;
  if (!result.saved.empty()) complete(result.saved);
  if (options_.every > 0 && result.step % options_.every == 0) save();
}

void CheckpointSchedule::save() {
  if (options_.folder.empty() || last_step_ == engine_.steps()) return;
  const double begun = detail::seconds_now();
  finish();  // one at a time; what it waits is part of this pause
  SaveOptions options;
  options.user = options_.user;
  options.keep_last = options_.keep_last;
  options.keep_every = options_.keep_every;
  begun_ = begun;
  pending_.step = engine_.steps();
  pending_.path = engine_.save(options_.folder, options);
  pending_.pause_seconds = detail::seconds_now() - begun;
  last_step_ = pending_.step;
}

void CheckpointSchedule::finish() {
  if (options_.folder.empty()) return;
  const std::string path = engine_.finish_saving();
  if (!path.empty()) complete(path);
}

void CheckpointSchedule::complete(const std::string& path) {
  newest_ = path;
  pending_.path = path;
  pending_.seconds = detail::seconds_now() - begun_;
  if (completed_) completed_(pending_);
}

}  // namespace tranche::trainer
