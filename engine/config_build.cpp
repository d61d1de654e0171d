// Optimizer and schedule from a Config.

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "engine/config_reader.h"
#include "tranche/core/error.h"

namespace tranche {
namespace detail {
namespace {

const std::vector<std::string>& parameters_of(std::string_view schedule) {
  static const std::vector<std::string> constant;
  static const std::vector<std::string> warmup = {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps",
                                                  "warmup_type"};
  static const std::vector<std::string> decay = {"total_num_steps", "warmup_min_lr", "warmup_max_lr",
                                                 "warmup_num_steps", "warmup_type"};
  static const std::vector<std::string> cosine = {"total_num_steps", "warmup_min_ratio", "warmup_num_steps",
                                                  "cos_min_ratio", "warmup_type"};
  static const std::vector<std::string> cycle = {"cycle_min_lr",
                                                 "cycle_max_lr",
                                                 "decay_lr_rate",
                                                 "cycle_first_step_size",
                                                 "cycle_second_step_size",
                                                 "cycle_first_stair_count",
                                                 "cycle_second_stair_count",
                                                 "decay_step_size",
                                                 "cycle_momentum",
                                                 "cycle_min_mom",
                                                 "cycle_max_mom",
                                                 "decay_mom_rate"};
  if (schedule == "WarmupLR") return warmup;
  if (schedule == "WarmupDecayLR") return decay;
  if (schedule == "WarmupCosineLR") return cosine;
  if (schedule == "OneCycle") return cycle;
  return constant;
}

std::string key(std::string_view name) {
  return "scheduler.params." + std::string(name);
}

WarmupType warmup_type(const Values& values, Problems& problems) {
  const std::string text = values.text(key("warmup_type")).value_or("log");
  if (text != "log" && text != "linear") {
    problems.add(fmt::format("scheduler.params.warmup_type: '{}' is not one of log, linear", text));
  }
  return text == "linear" ? WarmupType::linear : WarmupType::logarithmic;
}

/// The schedule's parameters with their defaults, built. nullptr after a problem.
std::unique_ptr<Schedule> build(const Config& config, const Values& values, std::int64_t total_steps,
                                Problems& problems) {
  const double rate = config.optimizer.learning_rate;
  const std::string& type = config.schedule.type;
  const auto number = [&](const char* name, double otherwise) {
    return values.number(key(name)).value_or(otherwise);
  };
  const auto integer = [&](const char* name, std::int64_t otherwise) {
    return values.integer(key(name)).value_or(otherwise);
  };
  if (type == "OneCycle") {
    OneCycleOptions options;
    for (const char* name : {"cycle_min_lr", "cycle_max_lr"}) {
      if (!values.has(key(name))) problems.add(fmt::format("scheduler.params.{}: OneCycle needs it", name));
    }
    if (!problems.empty()) return nullptr;
    options.cycle_min_lr = number("cycle_min_lr", 0);
    options.cycle_max_lr = number("cycle_max_lr", 0);
    options.decay_lr_rate = number("decay_lr_rate", 0);
    options.cycle_first_step_size = integer("cycle_first_step_size", 2000);
    options.cycle_second_step_size = values.integer(key("cycle_second_step_size"));
    options.cycle_first_stair_count = integer("cycle_first_stair_count", 0);
    options.cycle_second_stair_count = values.integer(key("cycle_second_stair_count"));
    options.decay_step_size = integer("decay_step_size", 0);
    // SGD has no betas to cycle; DeepSpeed leaves its momentum alone too.
    options.cycle_momentum =
        values.boolean(key("cycle_momentum")).value_or(true) && config.optimizer.type != "SGD";
    options.cycle_min_mom = number("cycle_min_mom", 0.8);
    options.cycle_max_mom = number("cycle_max_mom", 0.9);
    options.decay_mom_rate = number("decay_mom_rate", 0);
    return make_one_cycle_schedule(options);
  }
  if (type == "WarmupCosineLR") {
    WarmupCosineOptions options;
    options.learning_rate = rate;
    options.total_num_steps = total_steps;
    options.warmup_min_ratio = number("warmup_min_ratio", 0);
    options.warmup_num_steps = integer("warmup_num_steps", 1000);
    options.cos_min_ratio = number("cos_min_ratio", 0.0001);
    options.warmup_type = warmup_type(values, problems);
    return problems.empty() ? make_warmup_cosine_schedule(options) : nullptr;
  }
  if (type == "WarmupLR" || type == "WarmupDecayLR") {
    WarmupOptions options;
    options.warmup_min_lr = number("warmup_min_lr", 0);
    options.warmup_max_lr = number("warmup_max_lr", rate);
    options.warmup_num_steps = integer("warmup_num_steps", 1000);
    options.warmup_type = warmup_type(values, problems);
    if (!problems.empty()) return nullptr;
    if (type == "WarmupLR") return make_warmup_schedule(options);
    return make_warmup_decay_schedule({options, total_steps});
  }
  return make_constant_schedule(rate);
}

/// Reads parameters_json through the table of keys, as if it stood in a file.
Values schedule_values(const ScheduleConfig& schedule, Problems& problems) {
  Json document;
  document["scheduler"]["params"] = read_json(schedule.parameters_json, "the schedule's parameters");
  std::vector<IgnoredKey> ignored;
  Values values = check_keys(document, true, problems, ignored);
  const std::vector<std::string>& allowed = parameters_of(schedule.type);
  for (const std::string& name : values.names_within("scheduler.params")) {
    if (std::find(allowed.begin(), allowed.end(), name) != allowed.end()) continue;
    problems.add(fmt::format("scheduler.params.{} is no parameter of {}, which has {}", name, schedule.type,
                             allowed.empty() ? "none" : fmt::format("{}", fmt::join(allowed, ", "))));
  }
  return values;
}

bool needs_end(const std::string& type) {
  return type == "WarmupDecayLR" || type == "WarmupCosineLR";
}

}  // namespace

void check_schedule(const Config& config, Problems& problems) {
  Problems own;
  try {
    const Values values = schedule_values(config.schedule, own);
    // The end of the run may come later, from the program; every check but its own works without.
    const std::int64_t total =
        values.integer(key("total_num_steps")).value_or(std::max<std::int64_t>(1, config.total_steps_hint));
    if (own.empty()) build(config, values, total, own);
    own.raise("scheduler");
  } catch (const ConfigurationError& error) {
    problems.add(error.message());
  } catch (const InvalidArgument& error) {
    problems.add("scheduler.params: " + error.message());
  }
}

}  // namespace detail

std::unique_ptr<Schedule> make_schedule(const Config& config) {
  detail::Problems problems;
  const detail::Values values = detail::schedule_values(config.schedule, problems);
  problems.raise("configuration");
  std::int64_t total = values.integer(detail::key("total_num_steps")).value_or(config.total_steps_hint);
  if (detail::needs_end(config.schedule.type) && total < 1) {
    throw ConfigurationError(
        fmt::format("schedule {} must know where the run ends: set scheduler.params.total_num_steps or "
                    "tranche.total_steps",
                    config.schedule.type));
  }
  std::unique_ptr<Schedule> schedule;
  try {
    schedule = detail::build(config, values, total, problems);
  } catch (const InvalidArgument& error) {
    problems.add("scheduler.params: " + error.message());
  }
  problems.raise("configuration");
  return schedule;
}

std::unique_ptr<Optimizer> make_optimizer(const Config& config) {
  const OptimizerConfig& from = config.optimizer;
  try {
    if (from.type == "SGD") {
      return make_sgd({.momentum = from.momentum,
                       .dampening = from.dampening,
                       .weight_decay = from.weight_decay,
                       .nesterov = from.nesterov});
    }
    if (from.type == "AdamW" || from.type == "Adam") {
      return make_adam({.beta1 = from.beta1,
                        .beta2 = from.beta2,
                        .epsilon = from.epsilon,
                        .weight_decay = from.weight_decay,
                        .decoupled = from.type == "AdamW" || from.adam_w_mode,
                        .moment_dtype = config.precision.moments});
    }
  } catch (const InvalidArgument& error) {
    throw ConfigurationError("optimizer.params: " + error.message());
  }
  throw ConfigurationError(fmt::format("optimizer.type: '{}' is not one of {}", from.type,
                                       fmt::join(detail::optimizer_types(), ", ")));
}

}  // namespace tranche
