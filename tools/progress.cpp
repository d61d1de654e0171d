#include "tools/progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace tranche::tools {

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds)) return "?";
  const auto whole = static_cast<std::int64_t>(std::llround(std::max(0.0, seconds)));
  if (whole < 60) return fmt::format("{} s", whole);
  if (whole < 3600) return fmt::format("{} min {:02} s", whole / 60, whole % 60);
  return fmt::format("{} h {:02} min", whole / 3600, whole / 60 % 60);
}

std::string format_step_times(const StepResult& result) {
  const auto ms = [](double seconds) { return fmt::format("{:.3g}", 1e3 * seconds); };
  return fmt::format(
      "step {} in ms: forward {}, backward {}, update {}; waited for parameters {}, gradients {}, offload "
      "{}; {} in "
      "all, {} before it",
      result.step, ms(result.forward_seconds), ms(result.backward_seconds), ms(result.update_seconds),
      ms(result.exposed_gather_seconds), ms(result.exposed_reduce_seconds),
      ms(result.exposed_offload_seconds), ms(result.seconds), ms(result.between_seconds));
}

Progress::Progress(const ProgressOptions& options, Writer write)
    : options_(options), write_(std::move(write)) {}

std::string Progress::line(const StepResult& result, double tokens_per_second, double remaining) const {
  std::string text =
      fmt::format("step {:>{}}/{}", result.step, fmt::formatted_size("{}", options_.steps), options_.steps);
  text += fmt::format("  loss {:.4f}  norm {:.3g}  lr {:.3g}", result.loss, result.gradient_norm,
                      result.learning_rate);
  if (result.loss_scale != 1) text += fmt::format("  scale {:g}", result.loss_scale);
  text += fmt::format("  {:.0f} tokens/s", tokens_per_second);
  if (options_.peak_flops > 0) {
    text += fmt::format("  {:.0f}% of peak",
                        100 * tokens_per_second * options_.flops_per_token / options_.peak_flops);
  }
  text += fmt::format("  {} to go", format_duration(remaining));
  if (!result.applied) text += fmt::format("  SKIPPED: {}", result.skipped_because);
  return text;
}

bool Progress::due(std::int64_t step) const {
  const std::int64_t every = options_.log_every > 0
                                 ? options_.log_every
                                 : std::max<std::int64_t>(1, (options_.steps - options_.begin) / 50);
  return step == options_.begin + 1 || step >= options_.steps || step % every == 0;
}

void Progress::step(const StepResult& result, double elapsed) {
  const auto tokens = static_cast<double>(result.tokens);
  if (++counted_steps_ <= 2) {
    first_tokens_ += tokens;
    first_seconds_ += result.seconds;
  } else {
    counted_tokens_ += tokens;
    counted_seconds_ += result.seconds;
  }
  const double now = tokens / std::max(result.seconds, 1e-9);
  recent_ = counted_steps_ <= 3 ? now : 0.9 * recent_ + 0.1 * now;

  const double per_step =
      elapsed / static_cast<double>(std::max<std::int64_t>(result.step - options_.begin, 1));
  double remaining = per_step * static_cast<double>(options_.steps - result.step);
  if (options_.maximum_seconds > 0) {
    const double least = per_step * static_cast<double>(options_.minimum_steps - result.step);
    remaining = std::min(remaining, std::max(options_.maximum_seconds - elapsed, least));
  }
  const std::string text = line(result, recent_, remaining);
  if (options_.terminal) {
    // Blanks cover what a longer line left behind.
    write_(fmt::format("\r{:<{}}", text, drawn_));
    drawn_ = text.size();
    if (!result.applied) finish();
  } else if (due(result.step) || !result.applied) {
    write_(text + "\n");
  }
}

void Progress::say(std::string_view line) {
  if (options_.terminal && drawn_ > 0) {
    write_(fmt::format("\r{:<{}}\n", line, drawn_));
    drawn_ = 0;
  } else {
    write_(fmt::format("{}\n", line));
  }
}

void Progress::finish() {
  if (drawn_ > 0) write_("\n");
  drawn_ = 0;
}

double Progress::mean_tokens_per_second() const {
  if (counted_seconds_ > 0) return counted_tokens_ / counted_seconds_;
  return first_seconds_ > 0 ? first_tokens_ / first_seconds_ : 0;
}

double Progress::mean_peak_share() const {
  if (options_.peak_flops <= 0) return 0;
  return mean_tokens_per_second() * options_.flops_per_token / options_.peak_flops;
}

}  // namespace tranche::tools
