#include "tools/checkpoint_scheduler.h"

#include <fmt/format.h>

#include "core/clock.h"

namespace tranche::tools {

std::string format_pause(double seconds) {
  return seconds < 1 ? fmt::format("{:.3g} ms", 1000 * seconds) : fmt::format("{:.2f} s", seconds);
}

CheckpointScheduler::CheckpointScheduler(Engine& engine, const Options& options, std::string user,
                                         Report* report, Say say)
    : engine_(engine),
      options_(options),
      user_(std::move(user)),
      report_(report),
      say_(std::move(say)),
      last_step_(engine.steps()) {}

void CheckpointScheduler::after_step(const StepResult& result) {
  if (options_.checkpoint_dir.empty()) return;
  if (!result.saved.empty()) completed(result.saved);
  if (options_.save_every > 0 && result.step % options_.save_every == 0) save();
}

void CheckpointScheduler::save() {
  if (options_.checkpoint_dir.empty() || last_step_ == engine_.steps()) return;
  const double begun = detail::seconds_now();
  finish();  // one at a time; what it waits is part of this pause
  SaveOptions options;
  options.user = user_;
  options.keep_last = static_cast<int>(options_.keep_last);
  options.keep_every = options_.keep_every;
  begun_ = begun;
  pending_.step = engine_.steps();
  pending_.path = engine_.save(options_.checkpoint_dir, options);
  pending_.pause_seconds = detail::seconds_now() - begun;
  last_step_ = pending_.step;
}

void CheckpointScheduler::finish() {
  if (options_.checkpoint_dir.empty()) return;
  const std::string path = engine_.finish_saving();
  if (!path.empty()) completed(path);
}

void CheckpointScheduler::completed(const std::string& path) {
  newest_ = path;
  pending_.path = path;
  pending_.seconds = detail::seconds_now() - begun_;
  if (report_ != nullptr) report_->add_checkpoint(pending_);
  if (say_) {
    say_(fmt::format("checkpoint {} is complete: training paused for {}, all in {}", path,
                     format_pause(pending_.pause_seconds), format_pause(pending_.seconds)));
  }
}

}  // namespace tranche::tools
