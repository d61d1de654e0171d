#include "tools/train/progress.h"

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

std::string format_pause(double seconds) {
  return seconds < 1 ? fmt::format("{:.3g} ms", 1000 * seconds) : fmt::format("{:.2f} s", seconds);
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

namespace {

/// The number of norms to which a step's norm is compared, and the least number for a comparison.
constexpr std::size_t remembered_norms = 32, least_norms = 4;
/// A norm of at least so many medians is reported.
constexpr double unusual_norm = 8;
/// The interval between lines of a validation in a file.
constexpr double seconds_between_lines = 10;

/// The figures have fixed widths, because fewer digits for small numbers would move the columns.
std::string figures(const StepResult& result) {
  const std::string loss =
      result.tokens > 0 || !std::isnan(result.loss) ? fmt::format("{:.4f}", result.loss) : "none";
  return fmt::format("  loss {:<7}  norm {:<8.3g}  lr {:<8.3g}", loss, result.gradient_norm,
                     result.learning_rate);
}

}  // namespace

std::string format_rate(const TokenRate& rate, int width) {
  std::string text = fmt::format("{:>{}.0f} tokens/s", rate.positions, width);
  if (std::llround(rate.learned) != std::llround(rate.positions)) {
    text += fmt::format(" ({:.0f} learned)", rate.learned);
  }
  return text;
}

std::string Progress::line(const StepResult& result, double remaining, const std::string& remark) const {
  std::string text =
      fmt::format("step {:>{}}/{}", result.step, fmt::formatted_size("{}", options_.steps), options_.steps);
  text += figures(result);
  if (result.loss_scale != 1) text += fmt::format("  scale {:g}", result.loss_scale);
  if (result.noise.measured) text += fmt::format("  noise {:<9.4g}", result.noise.scale);
  text += "  " + format_rate(recent_, 7);
  if (options_.peak_flops > 0) text += fmt::format("  {:>3.0f}% of peak", 100 * peak_share(recent_));
  text += fmt::format("  {} to go", format_duration(remaining));
  if (!result.applied) {
    text += fmt::format("  SKIPPED: {}", result.skipped_because);
  } else if (result.clip_coefficient < 1) {
    text += fmt::format("  clipped x{:.2g}", result.clip_coefficient);
  }
  if (!remark.empty()) text += "  UNUSUAL: " + remark;
  return text;
}

std::string Progress::unusual(const StepResult& result) {
  if (!result.applied || !std::isfinite(result.gradient_norm)) return {};  // the line reports this itself
  std::string remark;
  if (norms_.size() >= least_norms) {
    std::vector<double> sorted = norms_;
    const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
    std::nth_element(sorted.begin(), middle, sorted.end());
    if (*middle > 0 && result.gradient_norm >= unusual_norm * *middle) {
      remark = fmt::format("norm is {:.2g}x the recent median", result.gradient_norm / *middle);
    }
  }
  if (norms_.size() < remembered_norms) {
    norms_.push_back(result.gradient_norm);
  } else {
    norms_[next_norm_] = result.gradient_norm;
    next_norm_ = (next_norm_ + 1) % remembered_norms;
  }
  return remark;
}

bool Progress::due(std::int64_t step) const {
  const std::int64_t every = options_.log_every > 0
                                 ? options_.log_every
                                 : std::max<std::int64_t>(1, (options_.steps - options_.begin) / 50);
  return step == options_.begin + 1 || step >= options_.steps || step % every == 0;
}

void Progress::step(const StepResult& result, double elapsed) {
  const TokenRate tokens{static_cast<double>(result.positions), static_cast<double>(result.tokens)};
  if (++counted_steps_ <= 2) {
    first_ = first_ + tokens;
    first_seconds_ += result.seconds;
  } else {
    counted_ = counted_ + tokens;
    counted_seconds_ += result.seconds;
  }
  const TokenRate now = tokens * (1 / std::max(result.seconds, 1e-9));
  recent_ = counted_steps_ <= 3 ? now : recent_ * 0.9 + now * 0.1;

  const double per_step =
      elapsed / static_cast<double>(std::max<std::int64_t>(result.step - options_.begin, 1));
  double remaining = per_step * static_cast<double>(options_.steps - result.step);
  if (options_.maximum_seconds > 0) {
    const double least = per_step * static_cast<double>(options_.minimum_steps - result.step);
    remaining = std::min(remaining, std::max(options_.maximum_seconds - elapsed, least));
  }
  const std::string remark = unusual(result);
  const std::string text = line(result, remaining, remark);
  const bool stays = !result.applied || !remark.empty();
  if (options_.terminal) {
    redraw(text);
    if (stays) finish();
  } else if (due(result.step) || stays) {
    write_(text + "\n");
  }
}

void Progress::redraw(const std::string& text) {
  // Blanks overwrite the rest of a longer line.
  write_(fmt::format("\r{:<{}}", text, drawn_));
  drawn_ = text.size();
}

void Progress::validating(std::int64_t done, std::int64_t windows, double seconds) {
  if (done == 0) written_seconds_ = 0;
  std::string text = fmt::format("validating: {} of {} windows", done, windows);
  if (done > 0) {
    const double remaining = seconds / static_cast<double>(done) * static_cast<double>(windows - done);
    text += fmt::format(", {} to go", format_duration(remaining));
  }
  if (options_.terminal) {
    redraw(text);
  } else if (done < windows && seconds >= written_seconds_ + seconds_between_lines) {
    written_seconds_ = seconds;
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

TokenRate Progress::mean_rate() const {
  if (counted_seconds_ > 0) return counted_ * (1 / counted_seconds_);
  return first_seconds_ > 0 ? first_ * (1 / first_seconds_) : TokenRate{};
}

double Progress::peak_share(const TokenRate& rate) const {
  return options_.peak_flops > 0 ? rate.positions * options_.flops_per_token / options_.peak_flops : 0;
}

double Progress::mean_peak_share() const {
  return peak_share(mean_rate());
}

}  // namespace tranche::tools
