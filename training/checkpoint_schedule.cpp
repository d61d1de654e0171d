#include "tranche/training/checkpoint_schedule.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/digest.h"
#include "checkpoint/folder.h"
#include "core/clock.h"
#include "core/json.h"
#include "offload/file_system.h"
#include "training/metrics_json.h"
#include "tranche/core/error.h"

namespace tranche::training {

using nlohmann::ordered_json;

namespace {

constexpr const char* evaluations_key = "evaluations";
constexpr const char* keep_best_key = "keep_best";
constexpr const char* validation_due_key = "validation_due";

/// The position of a set's loss in a checkpoint's user JSON.
std::string pointer_of(const std::string& set) {
  return (ordered_json::json_pointer("/" + std::string(evaluations_key)) / set / std::string("loss"))
      .to_string();
}

/// The set for which the newest checkpoint with that record keeps the best; empty if there is none.
std::string recorded_set(const std::vector<checkpoint::Listed>& found) {
  for (const checkpoint::Listed& listed : found) {
    if (!listed.complete()) continue;
    const auto user = detail::parse_json(listed.manifest->run.user);
    if (user.is_object() && user.contains(keep_best_key) && user[keep_best_key].is_string()) {
      return user[keep_best_key].get<std::string>();
    }
  }
  return {};
}

}  // namespace

std::optional<BestCheckpoint> best_checkpoint(const std::string& folder, std::string set) {
  const auto found = checkpoint::list_checkpoints(detail::posix_file_system(), folder);
  if (set.empty()) set = recorded_set(found);
  if (set.empty()) return std::nullopt;
  const std::string pointer = pointer_of(set);
  const checkpoint::Listed* const best = checkpoint::lowest(found, pointer);
  if (best == nullptr) return std::nullopt;
  BestCheckpoint chosen{best->path, best->step, set, *checkpoint::number_of(*best->manifest, pointer)};
  const auto record = detail::parse_json(best->manifest->run.user)[evaluations_key][set];
  if (record.contains("tokens")) chosen.tokens = detail::json_integer(record["tokens"]).value_or(0);
  if (record.contains("data") && record["data"].is_string())
    checkpoint::from_hex(record["data"].get<std::string>(), chosen.data);
  return chosen;
}

CheckpointSchedule::CheckpointSchedule(Engine& engine, CheckpointScheduleOptions options, Completed completed)
    : engine_(engine),
      options_(std::move(options)),
      completed_(std::move(completed)),
      last_step_(engine.steps()) {
  if (!detail::parse_json(options_.user).is_object()) {
    throw InvalidArgument(fmt::format("what a checkpoint is to say of the run is no JSON object: {}",
                                      options_.user.substr(0, 100)));
  }
  if (!options_.folder.empty() && !options_.keep_best.empty()) find_best();
}

/// Only rank 0 reads the folder, because other nodes may see its files late.
void CheckpointSchedule::find_best() {
  struct {
    double loss = 0;
    std::int64_t step = -1, tokens = 0;
    std::uint64_t data = 0;
  } found;
  static_assert(sizeof(found) == 32);
  std::string problem;
  if (engine_.runtime().rank() == 0) {
    try {
      best_ = best_checkpoint(options_.folder, options_.keep_best);
      if (best_) found = {best_->loss, best_->step, best_->tokens, best_->data};
    } catch (const CheckpointError& error) {
      problem = error.message();
      found.step = -2;
    }
  }
  engine_.runtime()
      .all()
      .broadcast(&found, sizeof(found), DataType::uint8, 0, {}, {"checkpoint", "best", Traffic::control})
      .wait();
  if (found.step == -2) {
    throw CheckpointError(problem.empty() ? "rank 0 cannot look for the best checkpoint in " + options_.folder
                                          : problem);
  }
  best_.reset();
  if (found.step < 0) return;
  best_ = {detail::join_path(options_.folder, checkpoint::step_name(found.step)),
           found.step,
           options_.keep_best,
           found.loss,
           found.tokens,
           found.data};
}

std::optional<BestCheckpoint> CheckpointSchedule::present() const {
  if (evaluated_step_ != engine_.steps()) return std::nullopt;
  for (const Evaluation& evaluation : evaluations_) {
    const EvaluationResult& result = evaluation.result;
    if (evaluation.set == options_.keep_best && result.tokens > 0 && std::isfinite(result.loss))
      return BestCheckpoint{{}, evaluated_step_, evaluation.set, result.loss, result.tokens, evaluation.data};
  }
  return std::nullopt;
}

void CheckpointSchedule::evaluated(std::vector<Evaluation> evaluations) {
  evaluations_ = std::move(evaluations);
  evaluated_step_ = engine_.steps();
  if (options_.folder.empty()) return;
  if (!options_.keep_best.empty()) save_best();
  // The checkpoint is saved again, to record what is now known about its weights.
  if (last_step_ == engine_.steps() && engine_.in_doubt() && !saved_in_doubt_ && saved_here_) save_now();
  if (is_due()) save_if_sound();
}

void CheckpointSchedule::save_if_sound() {
  if (last_step_ == engine_.steps()) return;
  if (engine_.skipped_at_end() == 0 && !engine_.in_doubt()) return save();
  if (!owed_ && options_.say) {
    options_.say(fmt::format(
        "the checkpoint that is due at step {} waits for a step that is not skipped{}", engine_.steps(),
        engine_.in_doubt() ? ": the weights may be ruined" : ", as this one was skipped"));
  }
  owed_ = true;
}

void CheckpointSchedule::save_best() {
  bool there = false;
  for (const Evaluation& evaluation : evaluations_) there = there || evaluation.set == options_.keep_best;
  if (!there) {
    throw InvalidArgument(fmt::format(
        "the best checkpoint is chosen by the loss on '{}', which was not evaluated", options_.keep_best));
  }
  const std::optional<BestCheckpoint> one = present();
  if (one && best_ &&
      (one->tokens != best_->tokens || (one->data != best_->data && one->data != 0 && best_->data != 0))) {
    if (options_.say) {
      options_.say(
          fmt::format("{} was the best so far, with a loss of {:.4f} over {} tokens of '{}'; the new loss "
                      "is over other windows, so the search for the best starts again",
                      best_->path, best_->loss, best_->tokens, best_->set));
    }
    best_.reset();
  }
  const auto is_best = [&] { return one && (!best_ || one->loss < best_->loss); };
  if (!is_best()) return;
  // This waits until it is known whether that save became a checkpoint.
  if (pending_best_ && one->loss >= pending_best_->loss) finish();
  if (is_best()) save_now();
}

void CheckpointSchedule::after_step(const StepResult& result, bool evaluation_follows) {
  if (options_.folder.empty()) return;
  if (!result.saved.empty()) complete(result.saved);
  if (is_due() && !evaluation_follows) save_if_sound();
}

void CheckpointSchedule::save(bool validation_due) {
  if (options_.folder.empty() || (last_step_ == engine_.steps() && !validation_due)) return;
  save_now(validation_due);
}

bool CheckpointSchedule::validation_due(const std::string& user) {
  const auto object = detail::parse_json(user);
  return object.is_object() && object.contains(validation_due_key) && object[validation_due_key] == true;
}

void CheckpointSchedule::save_now(bool validation_due) {
  const double begun = detail::seconds_now();
  finish();  // one save at a time; waiting here is part of this pause
  SaveOptions options;
  options.user = user(validation_due);
  options.keep_last = options_.keep_last;
  options.keep_every = options_.keep_every;
  if (!options_.keep_best.empty()) options.keep_lowest = pointer_of(options_.keep_best);
  begun_ = begun;
  pending_.step = engine_.steps();
  pending_best_ = options_.keep_best.empty() ? std::nullopt : present();
  pending_.path = engine_.save(options_.folder, options);
  pending_.pause_seconds = detail::seconds_now() - begun;
  last_step_ = pending_.step;
  saved_here_ = true;
  owed_ = false;
  saved_in_doubt_ = engine_.in_doubt();
  if (saved_in_doubt_ && options_.say) {
    options_.say(
        fmt::format("the weights of {} may be ruined: {}; older checkpoints stay, and --resume latest "
                    "prefers the newest that is not in doubt",
                    pending_.path,
                    engine_.skipped_at_end() == 0
                        ? std::string("they gave a loss that is not finite")
                        : fmt::format("{} steps in a row were skipped", engine_.skipped_at_end())));
  }
}

std::string CheckpointSchedule::user(bool validation_due) const {
  const bool evaluated = evaluated_step_ == engine_.steps();
  if (!evaluated && !validation_due && options_.keep_best.empty()) return options_.user;
  ordered_json user = detail::parse_json(options_.user);
  if (!options_.keep_best.empty()) user[keep_best_key] = options_.keep_best;
  if (validation_due) user[validation_due_key] = true;
  if (evaluated) {
    ordered_json& losses = user[evaluations_key] = ordered_json::object();
    for (const Evaluation& evaluation : evaluations_) {
      const EvaluationResult& result = evaluation.result;
      losses[evaluation.set] = {{"loss", loss_json(result)}, {"tokens", result.tokens}};
      if (evaluation.data != 0) losses[evaluation.set]["data"] = checkpoint::to_hex(evaluation.data);
    }
  }
  return user.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

void CheckpointSchedule::finish() {
  if (options_.folder.empty()) return;
  const std::string path = engine_.finish_saving();
  if (!path.empty()) complete(path);
  pending_best_.reset();
}

void CheckpointSchedule::complete(const std::string& path) {
  newest_ = path;
  pending_.path = path;
  pending_.seconds = detail::seconds_now() - begun_;
  pending_.best = false;
  if (pending_best_ && (!best_ || pending_best_->loss < best_->loss)) {
    pending_.best = true;
    best_ = pending_best_;
    best_->path = path;
  } else if (best_ && best_->step == pending_.step) {
    // The new checkpoint replaced the best one's step, as can happen in a run that continues from before it.
    // The next one may be the best of those that remain.
    find_best();
  }
  pending_best_.reset();
  if (completed_) completed_(pending_);
}

}  // namespace tranche::training
