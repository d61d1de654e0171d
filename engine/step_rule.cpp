#include "engine/step_rule.h"

#include <fmt/core.h>

#include <bit>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/json.h"
#include "engine/rank_texts.h"
#include "tranche/core/error.h"

namespace tranche::detail {

using nlohmann::ordered_json;

namespace {

constexpr double largest_rate = std::numeric_limits<float>::max();  // kernels take rates in fp32

bool is_rate(double rate) {
  return rate >= 0 && rate <= largest_rate;  // false for NaN
}

}  // namespace

StepRule::StepRule(const Runtime& runtime, const Config& config, std::unique_ptr<Schedule> own,
                   Breakdown& breakdown)
    : runtime_(runtime),
      config_(config),
      own_(own ? std::optional(own->describe()) : std::nullopt),
      schedule_(own ? std::move(own) : make_schedule(config)),
      breakdown_(breakdown) {}

void StepRule::set_rate(std::optional<double> rate) {
  if (rate && !is_rate(*rate)) {
    throw InvalidArgument(
        fmt::format("set_learning_rate({}): it must be finite and not negative, and at most {:.3g}, the "
                    "largest fp32 number",
                    *rate, largest_rate));
  }
  rate_ = rate;
}

std::string StepRule::schedule() const {
  return own_.value_or("the configuration's");
}

OptimizerStep StepRule::update(std::int64_t number) const {
  OptimizerStep step;
  step.step = number;
  step.learning_rate = rate_.value_or(schedule_->learning_rate(number));
  step.momentum = schedule_->momentum(number);
  return step;
}

void StepRule::declare(const OptimizerStep& update, StepRecord& mine) const {
  mine.learning_rate = update.learning_rate;
  mine.momentum = update.momentum;
  mine.has_hook = hook_ ? 1 : 0;
}

void StepRule::check(const std::vector<StepRecord>& records, std::int64_t step) const {
  const std::string of_step = " for step " + std::to_string(step);
  const auto name_of_rank = [&](std::size_t r) { return runtime_.mesh().name_of_rank(static_cast<int>(r)); };
  for (std::size_t r = 0; r < records.size(); ++r) {
    if (records[r].tokens >= 0) continue;
    // All ranks throw this error, so peers need no report.
    breakdown_.end_untold(std::make_exception_ptr(
        InvalidArgument(name_of_rank(r) + of_step + ": " + negative_count(records[r].tokens))));
    breakdown_.throw_if_ended();
  }
  for (std::size_t r = 1; r < records.size(); ++r) {
    const auto compare = [&](const char* what, double is, double was) {
      if (std::bit_cast<std::uint64_t>(is) == std::bit_cast<std::uint64_t>(was)) return;
      throw CommunicationError(fmt::format(
          "{} has a {} of {}{}, rank 0 one of {}: schedules and set_learning_rate() must give all ranks "
          "the same",
          name_of_rank(r), what, is, of_step, was));
    };
    compare("learning rate", records[r].learning_rate, records[0].learning_rate);
    compare("momentum", records[r].momentum, records[0].momentum);
    if (records[r].has_hook != records[0].has_hook) {
      throw CommunicationError(fmt::format("{} has {} gradient hook{}, rank 0 has {}: set it on all ranks",
                                           name_of_rank(r), records[r].has_hook != 0 ? "a" : "no", of_step,
                                           records[0].has_hook != 0 ? "one" : "none"));
    }
  }
  OptimizerStep update;
  update.learning_rate = records[0].learning_rate;
  update.momentum = records[0].momentum;
  check_rates(update, step);
}

void StepRule::check_rates(const OptimizerStep& update, std::int64_t step) const {
  std::string problem;
  if (!is_rate(update.learning_rate) || !std::isfinite(update.momentum)) {
    problem = fmt::format(
        "schedule {} gives a learning rate of {} and a momentum of {} for step {}; both must be finite, and "
        "the "
        "rate from 0 to {:.3g}, the largest fp32 number",
        schedule_->describe(), update.learning_rate, update.momentum, step, largest_rate);
  }
  for (const ParameterGroupRule& group : config_.group_rules) {
    const double rate =
        group.learning_rate.value_or(update.learning_rate) * group.learning_rate_factor.value_or(1);
    if (!problem.empty() || is_rate(rate)) continue;
    problem = fmt::format(
        "the parameter group '{}' has a learning rate of {} in step {}; it must be from 0 to {:.3g}, the "
        "largest fp32 number",
        group.pattern, rate, step, largest_rate);
  }
  if (problem.empty()) return;
  // All ranks throw this error, so peers need no report.
  breakdown_.end_untold(std::make_exception_ptr(ConfigurationError(problem)));
  breakdown_.throw_if_ended();
}

std::string StepRule::saved() const {
  ordered_json text{{"type", config_.schedule.type},
                    {"params", ordered_json::parse(config_.schedule.parameters_json)},
                    {"total_steps", config_.total_steps_hint}};
  if (own_) {
    const ordered_json own = parse_json(*own_);
    text = {{"own", own.is_discarded() ? ordered_json(*own_) : own}};
  }
  if (rate_) text["set_learning_rate"] = *rate_;
  return text.dump();
}

void StepRule::take_saved(const std::string& text, std::vector<std::string>& notes) {
  const auto now = ordered_json::parse(saved());
  const auto before = parse_json(text);
  rate_.reset();
  if (!before.is_object()) return;
  if (before.contains("set_learning_rate") && before["set_learning_rate"].is_number()) {
    rate_ = before["set_learning_rate"].get<double>();
  }
  if (before.contains("own") && now.contains("own") && before["own"] != now["own"]) {
    notes.push_back("the program's schedule is " + now["own"].dump() + ", was " + before["own"].dump());
  } else if (before.contains("own") && !now.contains("own")) {
    notes.push_back("the schedule is the configuration's, was the program's own " + before["own"].dump());
  } else if (!before.contains("own") && now.contains("own")) {
    notes.push_back("the schedule is the program's own " + now["own"].dump() + ", was the configuration's");
  }
}

std::string StepRule::ask_hook(const StepResult& found, double gradient_scale) {
  if (!hook_) return {};
  const GradientHook hook = hook_;  // a copy, because the hook may set another hook
  hook_scale_ = gradient_scale;
  std::string reason;
  try {
    reason = hook(found);
  } catch (...) {
    hook_scale_.reset();
    breakdown_.end(std::current_exception());  // for any exception, because the step cannot be undone
    throw;
  }
  hook_scale_.reset();
  const std::vector<std::string> all = exchange_texts(
      runtime_.all(), reason, OperationLabel{"step", "gradient hook", Traffic::control, Tier::host});
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r] == all[0]) continue;
    throw CommunicationError(
        fmt::format("the gradient hook of {} says '{}' in step {}, that of rank 0 '{}': all ranks must go "
                    "on, or skip for the same reason",
                    runtime_.mesh().name_of_rank(static_cast<int>(r)), all[r], found.step, all[0]));
  }
  return reason;
}

}  // namespace tranche::detail
