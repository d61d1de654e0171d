// Makes a Config from checked values, and checks its fields against each other.

#include "tranche/config/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <type_traits>

#include "config/keys.h"
#include "config/names.h"
#include "config/reader.h"
#include "core/closest_match.h"
#include "core/text_file.h"
#include "tranche/core/error.h"

namespace tranche {
namespace detail {
namespace {

const std::vector<std::string> schedule_types = {
    "constant", "WarmupLR",    "WarmupDecayLR", "WarmupCosineLR",
    "OneCycle", "LRRangeTest", "WSD",           "InverseSquareRoot"};

/// The entry of `names` that equals `text` in any case; empty if there is none.
std::string match(const std::vector<std::string>& names, const std::string& text) {
  const auto found = std::find_if(names.begin(), names.end(),
                                  [&](const std::string& name) { return lower(name) == lower(text); });
  return found == names.end() ? std::string() : *found;
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

/// Returns the type's name. The problem for a type that other programs have differs from the one for a typing
/// error.
std::string optimizer_type(const std::string& text, Problems& problems) {
  const std::string known = match(optimizer_types(), text);
  if (!known.empty()) return known;
  if (const std::string nearest = nearest_to_missing(text); !nearest.empty()) {
    problems.add_first(
        fmt::format("optimizer.type: {} is not part of this version; the nearest is {}", text, nearest));
  } else {
    const std::string closest = closest_match(text, optimizer_types());
    problems.add_first(fmt::format("optimizer.type: '{}' is not one of {}{}", text, joined(optimizer_types()),
                                   closest.empty() ? "" : "; did you mean " + closest + "?"));
  }
  return "AdamW";
}

/// The value of a key that has two names.
std::optional<bool> either(const Values& values, const char* path, const char* other, Problems& problems) {
  if (values.has(path) && values.has(other)) {
    problems.add(fmt::format("{} and {} are two names of one key; write one", path, other));
  }
  return values.boolean(values.has(path) ? path : other);
}

}  // namespace

std::string schedule_type(const std::string& text, Problems& problems) {
  const std::string known = match(schedule_types, text);
  if (!known.empty()) return known;
  const std::string closest = closest_match(text, schedule_types);
  problems.add_first(fmt::format("scheduler.type: '{}' is not one of {}{}", text, joined(schedule_types),
                                 closest.empty() ? "" : "; did you mean " + closest + "?"));
  return "constant";
}

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

int small_integer(const Values& values, std::string_view path, int otherwise, Problems& problems) {
  const std::int64_t value = values.integer(path).value_or(otherwise);
  if (value < INT32_MIN || value > INT32_MAX) {
    problems.add(fmt::format("{}: {} is out of range", path, value));
    return otherwise;
  }
  return static_cast<int>(value);
}

void read_compute(const Values& values, Config& config, Problems& problems) {
  const std::optional<bool> bf16 = either(values, "bf16.enabled", "bfloat16.enabled", problems);
  const std::optional<bool> fp16 = values.boolean("fp16.enabled");
  const bool automatic = values.is_automatic("bf16.enabled") || values.is_automatic("bfloat16.enabled");
  if (bf16.value_or(false) && fp16.value_or(false)) {
    problems.add("bf16.enabled and fp16.enabled are both true; choose one");
  }
  if (fp16.value_or(false)) {
    config.precision.compute = DataType::float16;
  } else {
    config.precision.compute = bf16.value_or(automatic) ? DataType::bfloat16 : DataType::float32;
  }
  config.precision_given = bf16.has_value() || automatic || fp16.value_or(false);
  config.loss_scaling = config.precision.compute == DataType::float16;
}

void read_loss_scale(const Values& values, Config& config, Problems& problems) {
  LossScalerOptions& scaler = config.loss_scaler;
  const double fixed = values.number("fp16.loss_scale").value_or(0);
  const std::int64_t power = values.integer("fp16.initial_scale_power").value_or(16);
  scaler.dynamic = fixed == 0;
  if (scaler.dynamic && (power < 0 || power > 80)) {
    problems.add(fmt::format("fp16.initial_scale_power: {} is not between 0 and 80", power));
  } else {
    scaler.initial_scale = scaler.dynamic ? std::ldexp(1.0, static_cast<int>(power)) : fixed;
  }
}

void read_optimizer(const Values& values, Config& config, Problems& problems) {
  OptimizerConfig& optimizer = config.optimizer;
  if (const auto type = values.text("optimizer.type")) optimizer.type = optimizer_type(*type, problems);
  const std::vector<std::string> allowed = optimizer_parameters(optimizer.type);
  for (const std::string& name : values.names_within("optimizer.params")) {
    if (std::find(allowed.begin(), allowed.end(), name) == allowed.end()) {
      problems.add(fmt::format("optimizer.params.{} is no parameter of {}, which has {}", name,
                               optimizer.type, joined(allowed)));
    }
  }
  const UpdateRule& rule = *find_rule(optimizer.type)->rule;
  optimizer.learning_rate = values.number("optimizer.params.lr").value_or(rule.learning_rate);
  for (const RuleOption& option : rule.options) {
    const std::string path = "optimizer.params." + std::string(option.name);
    if (!values.has(path)) continue;
    RuleValue& value = optimizer.parameters[std::string(option.name)];
    if (option.kind == RuleOption::Kind::flag) {
      value = values.boolean(path).value_or(false) ? 1 : 0;
    } else if (option.kind == RuleOption::Kind::number) {
      value = values.number(path).value_or(option.first);
    } else if (option.kind == RuleOption::Kind::choice) {
      const std::string text = values.text(path).value_or("");
      const auto found = std::find(option.choices.begin(), option.choices.end(), text);
      if (found == option.choices.end()) {
        problems.add(fmt::format("{}: '{}' is not one of {}", path, text, fmt::join(option.choices, ", ")));
      } else {
        value = static_cast<double>(found - option.choices.begin());
      }
    } else if (const std::vector<double> pair = values.numbers(path); pair.size() == 2) {
      value = std::array{pair[0], pair[1]};
    } else {
      problems.add(fmt::format("{}: expected two numbers, found {}", path, pair.size()));
      value = std::array{option.first, option.second};
    }
  }
}

void read_schedule(const Values& values, Config& config, Problems& problems) {
  if (const auto type = values.text("scheduler.type")) config.schedule.type = schedule_type(*type, problems);
  Json parameters = Json::object();
  for (const std::string& name : values.names_within("scheduler.params")) {
    parameters[name] = *values.json("scheduler.params." + name);
  }
  // Hugging Face's trainer writes its own warmup_steps, 0 if nobody sets it, which schedules replace by 2.
  if (config.schedule.type.starts_with("Warmup") &&
      values.is_automatic("scheduler.params.warmup_num_steps")) {
    parameters["warmup_num_steps"] = 2;
  }
  config.schedule.parameters_json = parameters.dump();
}

void read_groups(const Values& values, Config& config, Problems& problems) {
  for (const std::string& pattern : values.texts("tranche.decay")) {
    config.group_rules.push_back({pattern, std::nullopt, true});
  }
  for (const std::string& pattern : values.texts("tranche.no_decay")) {
    config.group_rules.push_back({pattern, std::nullopt, false});
  }
  if (!config.lora.any() && config.lora != LoraConfig{}) {
    problems.add(
        "tranche.lora: has no rank, and without adapters its other keys do nothing; give rank, as 8");
  }
  const Json* groups = values.json("tranche.parameter_groups");
  if (groups == nullptr || !groups->is_array()) return;
  for (const Json& entry : *groups) {
    ParameterGroupRule rule;
    // A wrong type has already been reported; values of the right type are still read.
    const Json group = entry.is_object() ? entry : Json::object();
    if (group.contains("pattern") && group["pattern"].is_string()) rule.pattern = group["pattern"];
    each_value(rule, [&]<typename T>(const char* name, std::optional<T>& value) {
      const Json given = group.value(name, Json());
      if constexpr (!std::is_same_v<T, std::array<double, 2>>) {
        if (std::is_same_v<T, bool> ? given.is_boolean() : given.is_number()) value = given.get<T>();
      } else if (given.is_array() &&
                 std::all_of(given.begin(), given.end(), [](const Json& beta) { return beta.is_number(); })) {
        if (given.size() == 2) {
          value = given.get<T>();
        } else {
          problems.add(fmt::format("tranche.parameter_groups: pattern '{}': expected two betas, found {}",
                                   rule.pattern, given.size()));
        }
      }
    });
    if (rule.learning_rate && config.schedule.type != "constant") {
      config.notes.push_back(
          fmt::format("tranche.parameter_groups: the rate of '{}' is {} in every step; {} does not change it "
                      "(learning_rate_factor follows the schedule)",
                      rule.pattern, *rule.learning_rate, config.schedule.type));
    }
    config.group_rules.push_back(std::move(rule));
  }
}

void read_cuts(const Values& values, Config& config, Problems& problems) {
  constexpr int most_units = 1 << 20;
  const Json* const cuts = values.json("tranche.pipeline_cuts");
  if (cuts == nullptr) return;
  constexpr std::array rules{PipelineCuts::balanced, PipelineCuts::equal, PipelineCuts::parameters};
  const auto* const named =
      std::find_if(rules.begin(), rules.end(), [&](PipelineCuts rule) { return *cuts == name_of(rule); });
  if (named != rules.end()) {
    config.pipeline_cuts = *named;
  } else if (cuts->is_array() && !cuts->empty() &&
             std::all_of(cuts->begin(), cuts->end(), [](const Json& cut) {
               return cut.is_number_integer() && cut >= 0 && cut <= most_units;
             })) {
    config.pipeline_cuts = PipelineCuts::listed;
    config.pipeline_begins = cuts->get<std::vector<int>>();
  } else {
    problems.add(
        fmt::format("tranche.pipeline_cuts: expected balanced, equal, parameters, or a list with the number "
                    "of the first unit of every stage (or chunk) except the first one, not {}",
                    cuts->dump()));
  }
}

void read_layout(const Values& values, Config& config, Problems& problems) {
  const Json* const layout = values.json("tranche.layout");
  if (layout == nullptr) return;
  if (!layout->is_object()) {
    problems.add(fmt::format(
        "tranche.layout: expected an object such as {{\"vocabulary\": \"whole\"}}, not {}", layout->dump()));
    return;
  }
  // Validation checks the texts, because a program may also have set them.
  for (const auto& [name, value] : layout->items()) {
    if (value.is_string()) {
      config.layout[name] = value.get<std::string>();
    } else {
      problems.add(fmt::format("tranche.layout: expected whole or tensor for each dimension, found {} for {}",
                               value.dump(), name));
    }
  }
}

namespace {

/// Reads the number of copies of the sharded state from tranche's keys or DeepSpeed's.
void read_replicas(const Values& values, Config& config, Problems& problems) {
  constexpr const char* mics = "zero_optimization.mics_shard_size";
  constexpr const char* hpz = "zero_optimization.zero_hpz_partition_size";
  const int of_mics = small_integer(values, mics, -1, problems);
  const int of_hpz = small_integer(values, hpz, 1, problems);
  if (of_mics == 0 || of_mics < -1) {
    problems.add(fmt::format("{}: {} is neither a number of ranks nor -1 (all)", mics, of_mics));
  } else if (of_mics > 0) {
    config.shard_size_key = mics;
    config.shard_size = of_mics;
  }
  if (of_hpz < 1) {
    problems.add(fmt::format("{}: {} is neither a number of ranks nor 1 (off)", hpz, of_hpz));
  } else if (of_hpz > 1) {
    if (of_mics > 0) {
      problems.add(
          fmt::format("{} and {} both say how many ranks share a copy; give one of them", mics, hpz));
    }
    if (config.stage != 3)
      problems.add(fmt::format("{}: {} needs stage 3, not {}", hpz, of_hpz, config.stage));
    if (values.text("tranche.replicate") == "all") {
      problems.add(
          fmt::format("{}: {} replicates parameters alone, but tranche.replicate is all", hpz, of_hpz));
    }
    config.shard_size_key = hpz;
    config.shard_size = of_hpz;
    config.replicate = Replicate::parameters;
  }
  // If the mesh is given too, both must agree; validation checks this once it knows the ranks.
  if (config.shard_size > 0 && config.mesh.empty()) {
    config.mesh = fmt::format("replicate=*, shard={}", config.shard_size);
  }
}

/// Reads DeepSpeed's key for the cuts. tranche.pipeline_cuts, which is read before, may set the same.
void read_partition(const Values& values, Config& config, Problems& problems) {
  const auto given = values.text("pipeline.partition");
  if (!given) return;
  const std::string method = lower(*given);
  if (method.starts_with("type:")) {
    problems.add(fmt::format(
        "pipeline.partition: '{}' balances layers by the names of their Python classes, which units do not "
        "have; write uniform, parameters or best, or list the cuts in tranche.pipeline_cuts",
        *given));
    return;
  }
  PipelineCuts cuts = PipelineCuts::balanced;
  if (method == "uniform") {
    cuts = PipelineCuts::equal;
  } else if (method == "parameters") {
    cuts = PipelineCuts::parameters;
  } else if (method == "best") {
    config.notes.emplace_back(
        "pipeline.partition: best is taken as tranche.pipeline_cuts balanced: the largest stage gets as few "
        "forward operations as possible");
  } else {
    problems.add(fmt::format("pipeline.partition: '{}' is not one of uniform, parameters, best", *given));
    return;
  }
  if (values.has("tranche.pipeline_cuts") && cuts != config.pipeline_cuts) {
    problems.add(
        fmt::format("pipeline.partition: {} means tranche.pipeline_cuts {}, but that key is {} in the same "
                    "configuration; give one of the two",
                    *given, name_of(cuts), values.json("tranche.pipeline_cuts")->dump()));
    return;
  }
  config.pipeline_cuts = cuts;
  config.pipeline_cuts_key = "pipeline.partition";
}

/// Sets the mesh axis `pipeline` from DeepSpeed's key; as in DeepSpeed it is the slowest axis. If the mesh is
/// given too, both must agree; validation checks this once it knows the ranks.
void read_stages(const Values& values, bool mesh_given, Config& config, Problems& problems) {
  constexpr const char* key = "pipeline.stages";
  if (!values.has(key)) return;
  config.pipeline_stages = small_integer(values, key, 1, problems);
  if (config.pipeline_stages < 1) {
    problems.add(fmt::format("{}: {} is not at least 1", key, config.pipeline_stages));
    config.pipeline_stages = 0;
  } else if (config.pipeline_stages > 1 && !mesh_given) {
    config.mesh =
        fmt::format("pipeline={}, {}", config.pipeline_stages, config.mesh.empty() ? "shard=*" : config.mesh);
  }
}

/// Sets the axis `context` from DeepSpeed's key for sequences on several ranks. Unless
/// tranche.context_exchange is set, attention exchanges heads, as in DeepSpeed's Ulysses.
void read_context_ranks(const Values& values, bool mesh_given, Config& config, Problems& problems) {
  constexpr const char* key = "sequence_parallel_size";
  if (!values.has(key)) return;
  config.context_ranks = small_integer(values, key, 1, problems);
  if (config.context_ranks < 1) {
    problems.add(fmt::format("{}: {} is not at least 1", key, config.context_ranks));
    config.context_ranks = 0;
    return;
  }
  if (config.context_ranks == 1) return;
  if (!values.has("tranche.context_exchange")) config.context_exchange = ContextExchange::ulysses;
  if (mesh_given) return;
  config.mesh =
      fmt::format("{}, context={}", config.mesh.empty() ? "shard=*" : config.mesh, config.context_ranks);
}

/// Sets the axis `tensor` from DeepSpeed's key for layers on several ranks. These are neighbours: the fastest
/// axis.
void read_tensor_ranks(const Values& values, bool mesh_given, Config& config, Problems& problems) {
  constexpr const char* key = "tensor_parallel.autotp_size";
  config.tensor_ranks = small_integer(values, key, 0, problems);
  if (config.tensor_ranks < 0) {
    problems.add(fmt::format("{}: {} is neither a number of ranks nor 0 (off)", key, config.tensor_ranks));
    config.tensor_ranks = 0;
  } else if (config.tensor_ranks > 1 && !mesh_given) {
    config.mesh =
        fmt::format("{}, tensor={}", config.mesh.empty() ? "shard=*" : config.mesh, config.tensor_ranks);
  }
}

/// Refuses values of adapters that would be taken as the defaults of a Config made in C++.
void refuse_empty_adapters(const Values& values, const Config& config, Problems& problems) {
  if (!config.lora.any()) return;
  if (values.number("tranche.lora.alpha") == 0) {
    problems.add(
        "tranche.lora.alpha: 0 would multiply what an adapter adds by 0; write a positive number, or leave "
        "it "
        "out, which is the rank");
  }
  if (values.has("tranche.lora.targets") && values.texts("tranche.lora.targets").empty()) {
    problems.add(
        "tranche.lora.targets: the list names no linear layer; name some, or leave it out, which is all but "
        "the head");
  }
}

/// Combines keys whose values depend on each other, after each was read separately.
void read_together(const Values& values, Config& config, Problems& problems) {
  read_partition(values, config, problems);
  refuse_empty_adapters(values, config, problems);
  if (config.gather_for == GatherFor::step && config.stage >= 0 && config.stage < 3) {
    config.notes.push_back(fmt::format(
        "tranche.gather_for: step has no effect: at stage {} every rank has all weights; they are "
        "gathered at stage 3",
        config.stage));
    config.gather_for = GatherFor::use;
  }
  const bool mesh_given = !config.mesh.empty();
  read_replicas(values, config, problems);
  read_context_ranks(values, mesh_given, config, problems);
  read_stages(values, mesh_given, config, problems);
  read_tensor_ranks(values, mesh_given, config, problems);
  read_offload(values, config, problems);
}

}  // namespace

const std::vector<std::string>& optimizer_types() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> result;
    for (const RuleType& type : rule_types()) result.emplace_back(type.name);
    return result;
  }();
  return names;
}

std::vector<std::string> optimizer_parameters(std::string_view type) {
  const RuleType* const known = find_rule(type);
  std::vector<std::string> names{"lr"};
  for (const RuleOption& option : (known == nullptr ? find_rule("AdamW") : known)->rule->options) {
    names.emplace_back(option.name);
  }
  return names;
}

bool is_known_type(std::string_view block, const Json& type) {
  const std::vector<std::string>& types = block == "scheduler" ? schedule_types : optimizer_types();
  return !type.is_string() || !match(types, type.get<std::string>()).empty();
}

Config config_from(const Values& values, Problems& problems) {
  Config config;
  // In a file that omits these keys they have other values than in a Config made in C++.
  config.micro_batch_size = config.accumulation_steps = 0;
  const bool clips = values.is_automatic("gradient_clipping");
  config.clipping_given = clips || values.has("gradient_clipping");
  if (!clips) config.gradient_clipping = 0;
  for (const ConfigKey& key : configuration_keys()) {
    if (key.only_if_written && !key.written(config)) continue;
    if (key.read != nullptr) {
      key.read(values, config, problems);
    } else if (key.field != nullptr) {
      read_field(key, values, config, problems);
    }
  }
  // A 0 in the file is a mistake; in the fields it means that the key is absent.
  for (const char* path :
       {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}) {
    if (values.integer(path) == 0) problems.add(fmt::format("{}: 0 is not at least 1", path));
  }
  if (!values.has("communication_data_type")) config.precision.communication = config.precision.compute;
  read_together(values, config, problems);
  return config;
}

/// The number of ranks that follows from the three batch figures. The figures count data ranks, each of which
/// has as many ranks as DeepSpeed's keys set for the axes `pipeline`, `context` and `tensor`. If the figures
/// do not determine a number, there is one data rank.
int ranks_of_batch(const Config& config) {
  std::int64_t asked = std::int64_t{std::max(1, config.pipeline_stages)} * std::max(1, config.context_ranks);
  asked = asked <= INT32_MAX ? asked * std::max(1, config.tensor_ranks) : asked;
  const int beside = asked <= INT32_MAX ? static_cast<int>(asked) : 1;
  const std::int64_t micro = config.micro_batch_size, steps = config.accumulation_steps;
  if (micro < 1 || steps < 1 || config.train_batch_size < 1) return beside;
  // The product of steps and micro is not computed, because it may overflow.
  const std::int64_t of_step = config.train_batch_size / steps, ranks = of_step / micro;
  const bool exact = of_step * steps == config.train_batch_size && ranks * micro == of_step;
  return exact && ranks <= INT32_MAX / beside ? static_cast<int>(ranks) * beside : beside;
}

Reading read_config_text(std::string_view text, std::optional<int> ranks,
                         const std::vector<std::string>& overrides, bool strict, const std::string& origin) {
  Json document = read_json(text, origin);
  Reading reading;
  std::vector<std::string> notes;
  std::vector<IgnoredKey> ignored;
  expand_zero_optimization(document, notes);
  expand_dots(document, "", reading.problems);
  apply_overrides(document, overrides, reading.problems, notes);
  expand_zero_optimization(document, notes);  // an override may use the older form too
  reading.values = check_keys(document, strict, reading.problems, ignored, overrides);
  reading.config = config_from(reading.values, reading.problems);
  Config& config = reading.config;
  config.ignored = std::move(ignored);
  config.notes.insert(config.notes.begin(), notes.begin(), notes.end());
  reading.ranks = ranks.value_or(ranks_of_batch(config));
  check_fields(config, reading.ranks, reading.problems);
  if (reading.problems.empty()) {
    note_differences(reading.values, config);
    note_idle_keys(reading.values, overrides, reading.ranks, config);
  }
  return reading;
}

}  // namespace detail

namespace {

Config parse(std::string_view text, int ranks, const std::vector<std::string>& overrides, bool strict,
             const std::string& origin) {
  detail::Reading reading = detail::read_config_text(text, ranks, overrides, strict, origin);
  reading.problems.raise(origin);
  Config& config = reading.config;
  // A key of the command line is named; keys of a file are counted.
  std::vector<std::string> named;
  std::erase_if(config.ignored, [&](const IgnoredKey& key) {
    if (!detail::is_overridden(key.key, overrides)) return false;
    named.push_back(describe(key));
    return true;
  });
  config.notes.insert(config.notes.begin(), named.begin(), named.end());
  return std::move(config);
}

}  // namespace

std::string describe(const IgnoredKey& ignored) {
  if (!ignored.unknown) return fmt::format("{}: no meaning here: {}", ignored.key, ignored.reason);
  return fmt::format("unknown key '{}': ignored{}{}", ignored.key, ignored.reason.empty() ? "" : "; ",
                     ignored.reason);
}

std::string describe(const std::vector<IgnoredKey>& ignored) {
  constexpr std::size_t most_names = 3;
  std::vector<std::string> unknown;
  for (const IgnoredKey& key : ignored) {
    if (key.unknown) unknown.push_back(fmt::format("'{}'", key.key));
  }
  std::string names;
  if (!unknown.empty()) {
    const std::size_t shown = std::min(unknown.size(), most_names);
    names =
        fmt::format("; unknown: {}{}",
                    fmt::join(unknown.begin(), unknown.begin() + static_cast<std::ptrdiff_t>(shown), ", "),
                    shown < unknown.size() ? fmt::format(" and {} more", unknown.size() - shown) : "");
  }
  return fmt::format("{} key{} of the configuration {} no effect here{} (--verbose lists {})", ignored.size(),
                     ignored.size() == 1 ? "" : "s", ignored.size() == 1 ? "has" : "have", names,
                     ignored.size() == 1 ? "it" : "them");
}

std::string_view name_of(ReductionPolicy policy) {
  return detail::name_in(policy);
}
std::string_view name_of(Replicate replicate) {
  return detail::name_in(replicate);
}
std::string_view name_of(ReplicaSum sum) {
  return detail::name_in(sum);
}
std::string_view name_of(UpdateTime time) {
  return detail::name_in(time);
}
std::string_view name_of(TieSum sum) {
  return detail::name_in(sum);
}
std::string_view name_of(PipelineCuts cuts) {
  return detail::name_in(cuts);
}
std::string_view name_of(TensorSums sums) {
  return detail::name_in(sums);
}
std::string_view name_of(ContextExchange exchange) {
  return detail::name_in(exchange);
}
std::string_view name_of(GatherFor gather_for) {
  return detail::name_in(gather_for);
}
std::string_view name_of(OffloadTier tier) {
  return detail::name_in(tier);
}
std::string_view name_of(MasterFormat format) {
  return detail::name_in(format);
}

Config parse_config(std::string_view json_text, int ranks, const std::vector<std::string>& overrides,
                    bool strict, const std::string& origin) {
  return parse(json_text, ranks, overrides, strict, origin);
}

Config load_config(const std::string& path, int ranks, const std::vector<std::string>& overrides,
                   bool strict) {
  const std::string text = detail::read_text_file(path, "configuration file", detail::Pipes::allowed);
  return parse(text, ranks, overrides, strict, fmt::format("configuration file '{}'", path));
}

void validate_config(Config& config, int ranks) {
  detail::Problems problems;
  detail::check_fields(config, ranks, problems);
  problems.raise("configuration");
}

std::int64_t parse_byte_size(std::string_view text) {
  const auto bytes = detail::size_from(text);
  if (!bytes) {
    throw ConfigurationError(fmt::format(
        "'{}' is not a size; write bytes or a number with KiB, MiB, GiB, TiB (or KB, MB, GB, TB)", text));
  }
  return *bytes;
}

}  // namespace tranche
