// The learning rate that a step uses, by whom it is set, and what a checkpoint says of it; what the program
// does with gradients before the update.

#include "tranche/engine/training_rule.h"

#include <fmt/core.h>

#include <bit>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/json.h"
#include "engine/engine_impl.h"
#include "engine/rank_texts.h"

namespace tranche {

using namespace detail;

using nlohmann::ordered_json;

OptimizerStep Engine::Impl::next_update() const {
  OptimizerStep step;
  step.step = applied_steps + 1;
  step.learning_rate = set_rate.value_or(schedule->learning_rate(step.step));
  step.momentum = schedule->momentum(step.step);
  return step;
}

void Engine::Impl::check_rule(const std::vector<StepRecord>& records) {
  const auto of_step = " for step " + std::to_string(steps_done + 1);
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
  if (!std::isfinite(records[0].learning_rate) || !std::isfinite(records[0].momentum)) {
    // All ranks throw it: none has to be told.
    broken = std::make_exception_ptr(ConfigurationError(
        fmt::format("schedule {} gives a learning rate of {} and a momentum of {}{}; both must be finite",
                    schedule->describe(), records[0].learning_rate, records[0].momentum, of_step)));
    std::rethrow_exception(broken);
  }
}

std::string Engine::Impl::rule_to_save() const {
  ordered_json text{{"type", config.schedule.type},
                    {"params", ordered_json::parse(config.schedule.parameters_json)},
                    {"total_steps", config.total_steps_hint}};
  if (own_schedule) {
    const ordered_json own = parse_json(*own_schedule);
    text = {{"own", own.is_discarded() ? ordered_json(*own_schedule) : own}};
  }
  if (set_rate) text["set_learning_rate"] = *set_rate;
  return text.dump();
}

void Engine::Impl::take_saved_rule(const std::string& saved_text, std::vector<std::string>& notes) {
  const auto saved = parse_json(saved_text);
  const auto now = ordered_json::parse(rule_to_save());
  set_rate.reset();
  if (!saved.is_object()) return;
  if (saved.contains("set_learning_rate") && saved["set_learning_rate"].is_number()) {
    set_rate = saved["set_learning_rate"].get<double>();
  }
  if (saved.contains("own") && now.contains("own") && saved["own"] != now["own"]) {
    notes.push_back("the program's schedule is " + now["own"].dump() + ", was " + saved["own"].dump());
  } else if (saved.contains("own") && !now.contains("own")) {
    notes.push_back("the schedule is the configuration's, was the program's own " + saved["own"].dump());
  } else if (!saved.contains("own") && now.contains("own")) {
    notes.push_back("the schedule is the program's own " + now["own"].dump() + ", was the configuration's");
  }
}

std::string Engine::Impl::ask_gradient_hook(const StepResult& found, const OptimizerStep& step) {
  if (!gradient_hook) return {};
  const GradientHook hook = gradient_hook;  // which may set another
  hook_scale = step.gradient_scale;
  std::string reason;
  try {
    reason = hook(found);
  } catch (...) {
    hook_scale.reset();
    break_down(std::current_exception());  // whatever it is: the step cannot be taken back
    throw;
  }
  hook_scale.reset();
  const std::vector<std::string> all =
      exchange_texts(world, reason, OperationLabel{"step", "gradient hook", Traffic::control, Tier::host});
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r] == all[0]) continue;
    throw CommunicationError(
        fmt::format("the gradient hook of {} says '{}' in step {}, that of rank 0 '{}': all ranks must go "
                    "on, or skip for the same reason",
                    name_of_rank(r), all[r], found.step, all[0]));
  }
  return reason;
}

void Engine::set_gradient_hook(GradientHook hook) {
  impl_->gradient_hook = std::move(hook);
}

void Engine::set_learning_rate(std::optional<double> rate) {
  if (rate && (!std::isfinite(*rate) || *rate < 0)) {
    throw InvalidArgument(fmt::format("set_learning_rate({}): it must be finite and not negative", *rate));
  }
  impl_->set_rate = rate;
}

}  // namespace tranche
