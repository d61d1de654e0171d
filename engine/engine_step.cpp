// The end of a step: what the ranks agreed on becomes an update, or a skipped step.

#include <cmath>
#include <limits>
#include <utility>

#include "core/clock.h"
#include "engine/engine_impl.h"
#include "engine/offloaded_state.h"

namespace tranche {

using namespace detail;

GradientNoise Engine::Impl::noise_of(const StepBoundary::Agreement& found, double unscale) {
  // For sums s over t tokens each, E |s|^2 / t is t |G|^2 + V, with V the variance of a token's gradient.
  const auto tokens = static_cast<double>(found.tokens);
  const double apart = found.squares_of_pieces * unscale * unscale;
  const double together = found.sum_of_squares * unscale * unscale / tokens;
  GradientNoise noise;
  noise.measured = true;
  noise.variance = (apart - together) / static_cast<double>(found.pieces - 1);
  noise.squares = (together - noise.variance) / tokens;
  noise.variance *= static_cast<double>(config.train_batch_size) / tokens;  // of a sample
  const double left = config.gradient_noise_smoothing;
  noise_averages.variance = left * noise_averages.variance + (1 - left) * noise.variance;
  noise_averages.squares = left * noise_averages.squares + (1 - left) * noise.squares;
  noise.scale = noise_averages.squares > 0 ? noise_averages.variance / noise_averages.squares
                                           : std::numeric_limits<double>::infinity();
  return noise;
}

void Engine::Impl::judge_step(const StepResult& result, bool by_hook) {
  if (result.applied) weights_written = false;
  if (result.applied || by_hook) {
    // A model of the program's own may give a loss that is not finite beside gradients that are.
    const bool sound = std::isfinite(result.loss);
    if (sound) session->prove();
    proven = sound && by_hook;  // an update may ruin what it changes
    in_doubt = !sound;
    skipped_at_end = 0;
    return;
  }
  ++skipped_at_end;
  proven = false;
  // An overflow of scaled gradients is ordinary; what has no finite loss is not.
  const bool ordinary = config.loss_scaling && std::isfinite(result.loss);
  if (result.tokens > 0 && !ordinary) in_doubt = true;
}

void Engine::Impl::judge_evaluation(const EvaluationResult& result) {
  if (result.tokens <= 0 || weights_written) return;  // what the program wrote says nothing of the training
  if (!std::isfinite(result.loss)) {
    in_doubt = true;
    proven = false;
  } else if (skipped_at_end == 0) {
    in_doubt = false;
    proven = true;
    session->prove();
  }
}

StepResult Engine::Impl::finish_step() {
  require(!in_pass(), "step() inside a micro-batch; call end_micro_batch() first");
  require(!in_evaluation(), "step() inside an evaluation; call end_evaluation() first");
  require(!hook_scale, "step() inside the gradient hook");
  require(in_step() && micro_batches.closed() == config.accumulation_steps,
          "step() after " + std::to_string(micro_batches.closed()) + " of " +
              std::to_string(config.accumulation_steps) + " micro-batches");
  set_phase("step");
  gatherer.end_step();
  recorder.end_pass();  // refuses while the model still holds memory of the step: before anything has changed
  for (const FlatBuffer* flat : store.trainable()) {
    recorder.exposed().wait_for(flat->reduce_done, Exposed::reduce);
    if (flat->optimizer_tier != OffloadTier::none) {
      recorder.exposed().wait_for(flat->gradients_on_host, Exposed::offload);
    }
  }
  const Event gradients_arrived = compute.record();
  const double issued = seconds_now();

  StepResult result;
  result.step = steps_done + 1;
  result.loss_scale = scaler.scale();
  OptimizerStep optimizer_step = next_update();
  result.learning_rate = optimizer_step.learning_rate;
  StepRecord mine;
  mine.save_at_rest = session->at_rest() ? 1 : 0;
  mine.stop_requested = stop_wanted.load(std::memory_order_relaxed) ? 1 : 0;
  mine.learning_rate = optimizer_step.learning_rate;
  mine.momentum = optimizer_step.momentum;
  mine.group_hash = call_order;
  mine.has_hook = gradient_hook ? 1 : 0;
  const StepBoundary::Agreement found =
      boundary.agree(mine, config.micro_batch_size * model.tokens_per_sample, result.step);
  check_rule(found.records);
  // A device has passed the point by now: agree() has synchronized.
  const double arrived = gradients_arrived.state() ? gradients_arrived.passed_at() : issued;
  result.tokens = found.tokens;
  result.positions = config.train_batch_size * model.tokens_per_sample;

  // The main gradient is loss_scale * 2^-k times the gradient of the summed loss; the mean divides by the
  // tokens seen.
  const double unscale = result.tokens > 0 ? std::ldexp(1.0, loss_exponent) /
                                                 (scaler.scale() * static_cast<double>(result.tokens))
                                           : 0.0;
  result.loss = result.tokens > 0 ? found.loss_sum / static_cast<double>(result.tokens)
                                  : std::numeric_limits<double>::quiet_NaN();
  result.gradient_norm = std::sqrt(found.sum_of_squares) * unscale;
  if (!found.non_finite.empty()) {
    result.skipped_because = "gradient of " + found.non_finite + " is not finite";
  } else if (result.tokens <= 0) {
    result.skipped_because = "the step saw no tokens";
  } else if (!std::isfinite(result.gradient_norm)) {
    result.skipped_because = "the gradient norm is not finite";
  }
  result.applied = result.skipped_because.empty();
  if (result.applied && !gradient_written && found.pieces >= 2) {
    result.noise = noise_of(found, unscale * static_cast<double>(found.tokens));
  }
  gradient_written = false;
  if (config.gradient_clipping > 0 && result.applied && result.gradient_norm > config.gradient_clipping) {
    result.clip_coefficient = config.gradient_clipping / (result.gradient_norm + 1e-6);
  }
  optimizer_step.gradient_scale = static_cast<float>(unscale * result.clip_coefficient);
  bool by_hook = false;
  if (result.applied) {
    const std::string reason = ask_gradient_hook(result, optimizer_step);
    by_hook = !reason.empty();
    if (by_hook) {
      result.applied = false;
      result.skipped_because = "the gradient hook: " + reason;
    }
  }
  optimizer_step.apply = result.applied;

  boundary.update(optimizer_step);

  // The scaler may give up; that is told once the step is closed. A step without tokens says nothing of the
  // scale.
  std::exception_ptr gave_up;
  if (config.loss_scaling && result.tokens > 0) {
    try {
      scaler.update(!result.applied && !by_hook);
    } catch (const NumericalError&) {
      gave_up = std::current_exception();
    }
  }
  applied_steps += result.applied ? 1 : 0;
  consecutive_skips = result.applied || by_hook ? 0 : consecutive_skips + 1;
  judge_step(result, by_hook);
  ++steps_done;
  samples_done += config.train_batch_size;
  tokens_done += result.tokens;
  micro_batches.restart();
  state = State::idle;
  reducer.begin_step();

  recorder.end_step(data_groups.all(), result);
  if (store.offload() != nullptr) store.offload()->report(result);
  const std::int64_t quantized = gatherer.take_quantized_elements();
  traffic.set_gathered(gatherer.take_gathered_elements(), quantized);
  const bool second = recorder.passes(Program::train) == 2;
  // The layout of the step is settled: what earlier passes took beside it goes back.
  if (recorder.take_repacked() || second) runtime.device().release_unused();
  if (second) {
    for (const std::string& problem : boundary.replay_problems()) runtime.log().warning(problem);
  }
  note_dropped_plans();
  bool all_at_rest = true;
  for (const StepRecord& record : found.records) {
    result.stop_requested |= record.stop_requested != 0;
    all_at_rest = all_at_rest && record.save_at_rest != 0;
  }
  if (session->in_progress() && all_at_rest) result.saved = session->advance_quietly();
  session->settle();
  recorder.stamp(result, std::isfinite(arrived) ? arrived : issued);
  set_phase("idle");
  const bool too_many = consecutive_skips >= config.maximum_consecutive_skips;
  if ((gave_up || too_many) && !result.saved.empty() && rank == 0) {
    runtime.log().info("the checkpoint " + result.saved + " is complete");  // the result does not get through
  }
  if (gave_up) std::rethrow_exception(gave_up);
  if (too_many) {
    throw NumericalError(
        std::to_string(consecutive_skips) + " steps in a row were skipped; the last because " +
        result.skipped_because +
        ". Lower the learning rate, check the data, or raise tranche.maximum_consecutive_skips");
  }
  return result;
}

}  // namespace tranche
