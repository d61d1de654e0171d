// Builds the optimizer and the schedule of a Config.

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "config/reader.h"
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
  static const std::vector<std::string> range_test = {"lr_range_test_min_lr", "lr_range_test_step_size",
                                                      "lr_range_test_step_rate", "lr_range_test_staircase"};
  static const std::vector<std::string> stable_decay = {"total_num_steps",  "num_warmup_steps",
                                                        "num_stable_steps", "num_decay_steps",
                                                        "min_lr_ratio",     "decay_type"};
  static const std::vector<std::string> inverse_root = {"num_warmup_steps", "timescale"};
  if (schedule == "LRRangeTest") return range_test;
  if (schedule == "WSD") return stable_decay;
  if (schedule == "InverseSquareRoot") return inverse_root;
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

bool has_betas(const OptimizerConfig& optimizer) {
  const std::vector<std::string> names = optimizer_parameters(optimizer.type);
  return std::find(names.begin(), names.end(), "betas") != names.end();
}

/// Builds the schedule from its parameters and their defaults. Returns nullptr after a problem.
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
    // Rules without betas have none to cycle; DeepSpeed does not cycle SGD's momentum either.
    options.cycle_momentum =
        values.boolean(key("cycle_momentum")).value_or(true) && has_betas(config.optimizer);
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
  if (type == "LRRangeTest") {
    RangeTestOptions options;
    options.min_lr = number("lr_range_test_min_lr", options.min_lr);
    options.step_size = integer("lr_range_test_step_size", options.step_size);
    options.step_rate = number("lr_range_test_step_rate", options.step_rate);
    options.staircase = values.boolean(key("lr_range_test_staircase")).value_or(false);
    return make_range_test_schedule(options);
  }
  if (type == "WSD") {
    StableDecayOptions options;
    options.learning_rate = rate;
    options.num_warmup_steps = integer("num_warmup_steps", 0);
    if (!values.has(key("num_decay_steps"))) problems.add("scheduler.params.num_decay_steps: WSD needs it");
    options.num_decay_steps = integer("num_decay_steps", 0);
    options.num_stable_steps =
        integer("num_stable_steps",
                std::max<std::int64_t>(0, total_steps - options.num_warmup_steps - options.num_decay_steps));
    options.min_lr_ratio = number("min_lr_ratio", 0);
    const std::string decay = values.text(key("decay_type")).value_or("cosine");
    const auto known = {DecayType::cosine, DecayType::linear, DecayType::one_minus_root};
    const auto* const found =
        std::find_if(known.begin(), known.end(), [&](DecayType each) { return name_of(each) == decay; });
    if (found == known.end()) {
      problems.add(
          fmt::format("scheduler.params.decay_type: '{}' is not one of cosine, linear, 1-sqrt", decay));
    }
    if (!problems.empty()) return nullptr;
    options.decay_type = *found;
    return make_stable_decay_schedule(options);
  }
  if (type == "InverseSquareRoot") {
    InverseRootOptions options;
    options.learning_rate = rate;
    options.num_warmup_steps = integer("num_warmup_steps", 0);
    options.timescale = values.integer(key("timescale"));
    return make_inverse_root_schedule(options);
  }
  return make_constant_schedule(rate);
}

/// Reads parameters_json through the table of keys, as if it were in a file.
Values schedule_values(const ScheduleConfig& schedule, Problems& problems) {
  Json document;
  document["scheduler"]["type"] = schedule.type;
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

bool needs_end(const std::string& type, const Values& values) {
  return type == "WarmupDecayLR" || type == "WarmupCosineLR" ||
         (type == "WSD" && !values.has(key("num_stable_steps")));
}

}  // namespace

void check_schedule(Config& config, Problems& problems) {
  Problems own;
  config.schedule.type = schedule_type(config.schedule.type, own);
  if (!own.empty()) return problems.add_first(own.lines().front());
  try {
    const Values values = schedule_values(config.schedule, own);
    // The program may set the end of the run later; every check except that one works without it.
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

std::unique_ptr<Schedule> make_schedule(const Config& given) {
  detail::Problems problems;
  Config config = given;
  config.schedule.type = detail::schedule_type(given.schedule.type, problems);
  problems.raise("configuration");
  const detail::Values values = detail::schedule_values(config.schedule, problems);
  problems.raise("configuration");
  std::int64_t total = values.integer(detail::key("total_num_steps")).value_or(config.total_steps_hint);
  if (detail::needs_end(config.schedule.type, values) && total < 1) {
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

std::vector<std::string> detail::notes_on_schedule(const Config& config, std::int64_t steps,
                                                   std::string_view whole) {
  detail::Problems problems;
  const detail::Values values = detail::schedule_values(config.schedule, problems);
  problems.raise("configuration");
  const std::string& type = config.schedule.type;
  const auto given = [&](const char* name, std::int64_t otherwise) {
    return values.integer(detail::key(name)).value_or(otherwise);
  };
  std::vector<std::string> notes;
  const auto run_of = [](std::int64_t count) {
    return fmt::format("{} step{}", count, count == 1 ? "" : "s");
  };
  // The schedule ends with total_num_steps, or else with tranche.total_steps, as make_schedule() has it.
  const std::int64_t end_of_schedule =
      given("total_num_steps", config.total_steps_hint > 0 ? config.total_steps_hint : steps);
  const auto beyond = [&](const std::string& what, std::int64_t end) {
    if (end > steps) {
      notes.push_back(fmt::format("{} ends with step {}, and the {} with step {}", what, end, whole, steps));
    }
  };
  if (type.starts_with("Warmup")) {
    const std::int64_t warmup = given("warmup_num_steps", 1000);
    const std::int64_t total = detail::needs_end(type, values) ? end_of_schedule : steps;
    const std::string rise =
        fmt::format("scheduler.params.warmup_num_steps{}: the warm-up",
                    values.has(detail::key("warmup_num_steps")) ? "" : ", not given, is 1000");
    beyond(rise, warmup);
    if (total != steps) {
      notes.push_back(fmt::format("{}: the schedule is for {}, and the {} has {}",
                                  values.has(detail::key("total_num_steps"))
                                      ? "scheduler.params.total_num_steps"
                                      : "tranche.total_steps",
                                  run_of(total), whole, run_of(steps)));
    }
    if (warmup > total && warmup <= steps) {
      notes.push_back(
          fmt::format("{} ends with step {}, and the schedule with step {}", rise, warmup, total));
    }
  } else if (type == "OneCycle") {
    const std::int64_t first = given("cycle_first_step_size", 2000);
    const std::int64_t cycle = first + given("cycle_second_step_size", first);
    beyond("scheduler.params.cycle_first_step_size: the rise of the cycle", first);
    if (first <= steps) beyond("scheduler.params.cycle_second_step_size: the cycle", cycle);
  } else if (type == "LRRangeTest") {
    const std::int64_t interval = given("lr_range_test_step_size", 2000);
    beyond("scheduler.params.lr_range_test_step_size: the first interval", interval);
  } else if (type == "WSD") {
    const std::int64_t warmup = given("num_warmup_steps", 0), decay = given("num_decay_steps", 0);
    const std::int64_t stable =
        given("num_stable_steps", std::max<std::int64_t>(0, end_of_schedule - warmup - decay));
    const std::int64_t end = warmup + stable + decay;
    beyond("scheduler.params.num_warmup_steps: the warm-up", warmup);
    if (warmup <= steps) beyond("scheduler.params.num_decay_steps: the decay", end);
    if (end < steps) {
      notes.push_back(fmt::format(
          "scheduler.params.num_decay_steps: the decay ends with step {}, and the {} with step {}", end,
          whole, steps));
    }
  } else if (type == "InverseSquareRoot") {
    beyond("scheduler.params.num_warmup_steps: the warm-up", given("num_warmup_steps", 0));
  }
  return notes;
}

std::vector<std::string> schedule_notes(const Config& config, std::int64_t steps) {
  return detail::notes_on_schedule(config, steps, "run");
}

std::unique_ptr<Optimizer> make_optimizer(const Config& config) {
  const OptimizerConfig& from = config.optimizer;
  if (find_rule(from.type) == nullptr) {
    throw ConfigurationError(fmt::format("optimizer.type: '{}' is not one of {}", from.type,
                                         fmt::join(detail::optimizer_types(), ", ")));
  }
  std::unique_ptr<Optimizer> optimizer;
  try {
    optimizer = make_rule_optimizer(from.type, from.parameters, DataType::float32, from.learning_rate);
  } catch (const InvalidArgument& error) {
    throw ConfigurationError("optimizer.params: " + error.message());
  }
  if (config.precision.moments == DataType::float32) return optimizer;
  try {
    return make_rule_optimizer(from.type, from.parameters, config.precision.moments, from.learning_rate);
  } catch (const InvalidArgument& error) {
    throw ConfigurationError("tranche.moments: " + error.message());
  }
}

}  // namespace tranche
