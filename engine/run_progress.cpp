#include "engine/run_progress.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "core/json.h"
#include "tranche/core/error.h"

namespace tranche::detail {

void RunProgress::take_step(const StepResult& result, bool skipped_by_hook) {
  ++steps_;
  applied_ += result.applied ? 1 : 0;
  samples_ += config_.train_batch_size;
  tokens_ += result.tokens;
  if (result.applied) weights_written_ = false;
  if (result.applied || skipped_by_hook) {
    // A user's model may have a loss that is not finite although its gradients are.
    const bool sound = std::isfinite(result.loss);
    if (sound) session_.prove();
    proven_ = sound && skipped_by_hook;  // an applied update may ruin the weights
    in_doubt_ = !sound;
    skipped_at_end_ = consecutive_skips_ = 0;
    return;
  }
  ++consecutive_skips_;
  ++skipped_at_end_;
  proven_ = false;
  // With loss scaling an overflow is ordinary if the loss is finite.
  const bool ordinary = config_.loss_scaling && std::isfinite(result.loss);
  if (result.tokens > 0 && !ordinary) in_doubt_ = true;
}

std::exception_ptr RunProgress::too_many_skips(const StepResult& last) const {
  if (consecutive_skips_ < config_.maximum_consecutive_skips) return nullptr;
  return std::make_exception_ptr(NumericalError(
      std::to_string(consecutive_skips_) + " steps in a row were skipped; the last because " +
      last.skipped_because +
      ". Lower the learning rate, check the data, or raise tranche.maximum_consecutive_skips"));
}

void RunProgress::take_evaluation(const EvaluationResult& result) {
  if (result.tokens <= 0 || weights_written_) return;  // written weights prove nothing about training
  if (!std::isfinite(result.loss)) {
    in_doubt_ = true;
    proven_ = false;
  } else if (skipped_at_end_ == 0) {
    in_doubt_ = false;
    proven_ = true;
    session_.prove();
  }
}

void RunProgress::weights_written() {
  weights_written_ = true;
  weights_loaded();
}

void RunProgress::weights_loaded() {
  proven_ = false;
  session_.forget_last_save();
}

GradientNoise RunProgress::noise_of(const StepBoundary::Agreement& found, double unscale) {
  // For sums s over t tokens each, E |s|^2 / t is t |G|^2 + V, where V is the variance of one token's
  // gradient.
  const auto tokens = static_cast<double>(found.tokens);
  const double apart = found.squares_of_pieces * unscale * unscale;
  const double together = found.sum_of_squares * unscale * unscale / tokens;
  GradientNoise noise;
  noise.measured = true;
  noise.variance = (apart - together) / static_cast<double>(found.pieces - 1);
  noise.squares = (together - noise.variance) / tokens;
  noise.variance *= static_cast<double>(config_.train_batch_size) / tokens;  // of one sample
  const double left = config_.gradient_noise_smoothing;
  noise_.variance = left * noise_.variance + (1 - left) * noise.variance;
  noise_.squares = left * noise_.squares + (1 - left) * noise.squares;
  noise.scale =
      noise_.squares > 0 ? noise_.variance / noise_.squares : std::numeric_limits<double>::infinity();
  return noise;
}

void RunProgress::describe(checkpoint::RunState& run) const {
  run.applied = applied_;
  run.skipped = skipped_at_end_;
  run.in_doubt = in_doubt_;
  run.samples = samples_;
  run.tokens = tokens_;
  if (config_.gradient_noise_scale) {
    run.gradient_noise =
        nlohmann::ordered_json{{"variance", noise_.variance}, {"squares", noise_.squares}}.dump();
  }
}

void RunProgress::go_on_from(const checkpoint::RunState& run, std::vector<std::string>& notes) {
  noise_ = {};
  const auto saved = parse_json(run.gradient_noise);
  const auto has_number = [&](const char* key) { return saved.contains(key) && saved[key].is_number(); };
  if (has_number("variance") && has_number("squares")) {
    noise_.variance = saved["variance"];
    noise_.squares = saved["squares"];
  } else if (config_.gradient_noise_scale) {
    notes.emplace_back("saved without averages of the gradient noise: they begin anew");
  }
  steps_ = run.step;
  applied_ = run.applied;
  skipped_at_end_ = run.skipped;
  in_doubt_ = run.in_doubt;
  samples_ = run.samples;
  tokens_ = run.tokens;
}

}  // namespace tranche::detail
