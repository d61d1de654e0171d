// The end of a step: an update, or a skipped step, as the ranks agree (see the note in step_record.h).

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/clock.h"
#include "engine/engine_impl.h"
#include "engine/offloaded_state.h"

namespace tranche {

using namespace detail;

void Engine::Impl::end_passes() {
  require(!sequence.in_pass(), "step() inside a micro-batch; call end_micro_batch() first");
  require(!sequence.in_evaluation(), "step() inside an evaluation; call end_evaluation() first");
  require(!rule.hook_scale(), "step() inside the gradient hook");
  require(sequence.complete(), "step() after " + std::to_string(sequence.micro_batches().closed()) + " of " +
                                   std::to_string(config.accumulation_steps) + " micro-batches");
  set_phase("step");
  gatherer.end_step();
  // It throws while the model still holds memory of the step. Nothing has changed by then but units that were
  // updated early, and step() may be called again.
  recorder.end_pass();
  for (const FlatBuffer* flat : store.trainable()) {
    recorder.exposed().wait_for(flat->reduce_done, Exposed::reduce);
    if (flat->optimizer_tier != OffloadTier::none) {
      recorder.exposed().wait_for(flat->gradients_on_host, Exposed::offload);
    }
  }
}

double Engine::Impl::unscale(std::int64_t tokens) const {
  return tokens > 0 ? std::ldexp(1.0, loss_exponent()) / (scaler.scale() * static_cast<double>(tokens)) : 0.0;
}

void Engine::Impl::judge_gradients(const StepBoundary::Agreement& found, StepResult& result) {
  result.tokens = found.tokens;
  result.positions = config.train_batch_size * model.tokens_per_sample;
  const double scale = unscale(found.tokens);
  result.loss = result.tokens > 0 ? found.loss_sum / static_cast<double>(result.tokens)
                                  : std::numeric_limits<double>::quiet_NaN();
  result.gradient_norm = std::sqrt(found.sum_of_squares) * scale;
  if (!found.non_finite.empty()) {
    result.skipped_because = "gradient of " + found.non_finite + " is not finite";
  } else if (result.tokens <= 0) {
    result.skipped_because = "the step saw no tokens";
  } else if (!std::isfinite(result.gradient_norm)) {
    result.skipped_because = "the gradient norm is not finite";
  }
  result.applied = result.skipped_because.empty();
  if (result.applied && !gradient_written && found.pieces >= 2) {
    result.noise = progress.noise_of(found, scale * static_cast<double>(found.tokens));
  }
  gradient_written = false;
  if (config.gradient_clipping > 0 && result.applied && result.gradient_norm > config.gradient_clipping) {
    result.clip_coefficient = config.gradient_clipping / (result.gradient_norm + 1e-6);
  }
}

void Engine::Impl::require_foreseen(const StepResult& result) {
  if (!sequence.early().begun()) return;
  const std::string step = "step " + std::to_string(result.step);
  const char* const lost =
      ": tranche.update: as_reduced had updated units before the ranks could agree, and their state is lost; "
      "go on from a checkpoint";
  std::exception_ptr error;
  if (!result.applied) {
    error = std::make_exception_ptr(
        NumericalError(step + " cannot be skipped any more, but " + result.skipped_because + lost));
  } else if (result.tokens != result.positions && !simulated()) {
    error = std::make_exception_ptr(
        ConfigurationError(step + " learned from " + std::to_string(result.tokens) +
                           " tokens, not from the " + std::to_string(result.positions) + " of its samples" +
                           lost + ", with at_the_boundary, which counts tokens first"));
  }
  if (!error) return;
  try {  // the save under way has all its tiles, and all ranks are here
    const std::string saved = session.finish();
    if (!saved.empty() && world.rank() == 0) {
      runtime.log().info("the checkpoint " + saved + " is complete");
    }
  } catch (const Error& failed) {
    runtime.log().warning(failed.message());
  }
  breakdown.end_untold(error);  // all ranks throw this error, so peers need no report
  breakdown.throw_if_ended();
}

void Engine::Impl::close_step(StepResult& result) {
  sequence.end_step();
  recorder.end_step(data_groups.all(), result);
  if (store.offload() != nullptr) store.offload()->report(result);
  const std::int64_t quantized = gatherer.take_quantized_elements();
  traffic.set_gathered(gatherer.take_gathered_elements(), quantized);
  const bool second = recorder.passes(Program::train) == 2;
  // The layout of the step is final: memory that earlier passes used outside it is freed.
  if (recorder.take_repacked() || second) runtime.device().release_unused();
  if (second) {
    for (const std::string& problem : boundary.replay_problems()) runtime.log().warning(problem);
  }
}

StepResult Engine::Impl::finish_step() {
  end_passes();
  sequence.early().finish();
  const Event gradients_arrived = compute.record();
  const double issued = seconds_now();
  StepResult result;
  result.step = progress.steps() + 1;
  result.loss_scale = scaler.scale();
  OptimizerStep update = rule.update(progress.applied() + 1);
  result.learning_rate = update.learning_rate;
  StepRecord mine;
  mine.save_at_rest = session.at_rest() ? 1 : 0;
  mine.stop_requested = stop_wanted.load(std::memory_order_relaxed) ? 1 : 0;
  mine.group_hash = sequence.calls();
  rule.declare(update, mine);
  const StepBoundary::Agreement found =
      boundary.agree(mine, config.micro_batch_size * model.tokens_per_sample, result.step);
  rule.check(found.records, result.step);
  // The device has passed this point, because agree() has synchronized.
  const double arrived = gradients_arrived.state() ? gradients_arrived.passed_at() : issued;

  judge_gradients(found, result);
  require_foreseen(result);
  update.gradient_scale = static_cast<float>(unscale(found.tokens) * result.clip_coefficient);
  bool by_hook = false;
  if (result.applied) {
    const std::string reason = rule.ask_hook(result, update.gradient_scale);
    by_hook = !reason.empty();
    if (by_hook) result.skipped_because = "the gradient hook: " + reason;
    result.applied = !by_hook;
  }
  update.apply = result.applied;
  if (!sequence.early().begun()) boundary.update(update);

  // The scaler may give up, which is thrown after the step is closed. A step without tokens does not affect
  // the scale.
  std::exception_ptr gave_up;
  if (config.loss_scaling && result.tokens > 0) {
    try {
      scaler.update(!result.applied && !by_hook);
    } catch (const NumericalError&) {
      gave_up = std::current_exception();
    }
  }
  progress.take_step(result, by_hook);
  close_step(result);
  const bool all_at_rest = std::all_of(found.records.begin(), found.records.end(),
                                       [](const StepRecord& record) { return record.save_at_rest != 0; });
  for (const StepRecord& record : found.records) result.stop_requested |= record.stop_requested != 0;
  if (session.in_progress() && all_at_rest) result.saved = session.advance_quietly();
  session.settle();
  recorder.stamp(result, std::isfinite(arrived) ? arrived : issued);
  set_phase("idle");
  if (!gave_up) gave_up = progress.too_many_skips(result);
  if (gave_up && !result.saved.empty() && world.rank() == 0) {
    // The exception replaces the result, so this is logged.
    runtime.log().info("the checkpoint " + result.saved + " is complete");
  }
  if (gave_up) std::rethrow_exception(gave_up);
  return result;
}

}  // namespace tranche
