// A Config from checked values, and the checks across its fields.

#include "tranche/config/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>

#include "core/closest_match.h"
#include "core/text_file.h"
#include "config/reader.h"
#include "tranche/core/error.h"

namespace tranche {
namespace detail {
namespace {

const std::vector<std::string> schedule_types = {
    "constant", "WarmupLR",    "WarmupDecayLR", "WarmupCosineLR",
    "OneCycle", "LRRangeTest", "WSD",           "InverseSquareRoot"};

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

/// The entry of `names` that `text` spells, in any case of letters; empty when none.
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

/// One that is known elsewhere is told apart from a typing error.
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

std::string schedule_type(const std::string& text, Problems& problems) {
  const std::string known = match(schedule_types, text);
  if (!known.empty()) return known;
  const std::string closest = closest_match(text, schedule_types);
  problems.add_first(fmt::format("scheduler.type: '{}' is not one of {}{}", text, joined(schedule_types),
                                 closest.empty() ? "" : "; did you mean " + closest + "?"));
  return "constant";
}

DataType read_data_type(const Values& values, const char* path, DataType otherwise, Problems& problems) {
  const auto text = values.text(path);
  if (!text) return otherwise;
  const auto dtype = data_type_from(lower(*text));
  if (!dtype) problems.add(fmt::format("{}: '{}' is not one of fp32, bf16, fp16", path, *text));
  return dtype.value_or(otherwise);
}

/// The value under either of two names of a key.
template <typename Get>
auto either(const Values& values, const char* path, const char* other, Get get, Problems& problems) {
  if (values.has(path) && values.has(other)) {
    problems.add(fmt::format("{} and {} are two names of one key; write one", path, other));
  }
  return values.has(path) ? get(path) : get(other);
}

/// Integers of the file that land in int fields.
int small_integer(const Values& values, const char* path, int otherwise, Problems& problems) {
  const std::int64_t value = values.integer(path).value_or(otherwise);
  if (value < INT32_MIN || value > INT32_MAX) {
    problems.add(fmt::format("{}: {} is out of range", path, value));
    return otherwise;
  }
  return static_cast<int>(value);
}

void read_monitor(const Values& values, const std::string& block, MonitorConfig& monitor) {
  monitor.enabled = values.boolean(block + ".enabled").value_or(monitor.enabled);
  monitor.output_path = values.text(block + ".output_path").value_or(monitor.output_path);
  monitor.job_name = values.text(block + ".job_name").value_or(monitor.job_name);
}

void read_precision(const Values& values, Config& config, Problems& problems) {
  const auto boolean = [&](const char* path) { return values.boolean(path); };
  const std::optional<bool> bf16 = either(values, "bf16.enabled", "bfloat16.enabled", boolean, problems);
  const std::optional<bool> fp16 = values.boolean("fp16.enabled");
  const bool automatic = values.is_automatic("bf16.enabled") || values.is_automatic("bfloat16.enabled");
  PrecisionConfig& precision = config.precision;
  if (bf16.value_or(false) && fp16.value_or(false)) {
    problems.add("bf16.enabled and fp16.enabled are both true; choose one");
  }
  if (fp16.value_or(false)) {
    precision.compute = DataType::float16;
  } else {
    precision.compute = bf16.value_or(automatic) ? DataType::bfloat16 : DataType::float32;
  }
  config.precision_given = bf16.has_value() || automatic || fp16.value_or(false);
  precision.communication = read_data_type(values, "communication_data_type", precision.compute, problems);
  precision.accumulation = read_data_type(values, "data_types.grad_accum_dtype", DataType::float32, problems);
  const auto moments = values.text("tranche.moments");
  if (moments && lower(*moments) == name_of(DataType::block8)) {
    precision.moments = DataType::block8;
  } else if (moments && !data_type_from(lower(*moments))) {
    problems.add(fmt::format("tranche.moments: '{}' is not one of fp32, bf16, block8", *moments));
  } else {
    precision.moments = read_data_type(values, "tranche.moments", DataType::float32, problems);
  }
  const std::string master = lower(values.text("tranche.master").value_or("fp32"));
  if (master == "split") {
    precision.master = MasterFormat::split;
  } else if (master == "none") {
    precision.master = MasterFormat::none;
  } else if (master != "fp32") {
    problems.add(fmt::format("tranche.master: '{}' is not one of fp32, split, none", master));
  }
  precision.stochastic_rounding = values.boolean("tranche.stochastic_rounding").value_or(false);

  config.loss_scaling = precision.compute == DataType::float16;
  if (!config.loss_scaling) return;
  LossScalerOptions& scaler = config.loss_scaler;
  const double fixed = values.number("fp16.loss_scale").value_or(0);
  const std::int64_t power = values.integer("fp16.initial_scale_power").value_or(16);
  scaler.dynamic = fixed == 0;
  if (scaler.dynamic && (power < 0 || power > 80)) {
    problems.add(fmt::format("fp16.initial_scale_power: {} is not between 0 and 80", power));
  } else {
    scaler.initial_scale = scaler.dynamic ? std::ldexp(1.0, static_cast<int>(power)) : fixed;
  }
  scaler.window = values.integer("fp16.loss_scale_window").value_or(scaler.window);
  scaler.hysteresis = small_integer(values, "fp16.hysteresis", scaler.hysteresis, problems);
  scaler.consecutive_hysteresis =
      values.boolean("fp16.consecutive_hysteresis").value_or(scaler.consecutive_hysteresis);
  scaler.minimum_scale = values.number("fp16.min_loss_scale").value_or(scaler.minimum_scale);
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

  if (const auto type = values.text("scheduler.type")) config.schedule.type = schedule_type(*type, problems);
  Json parameters = Json::object();
  for (const std::string& name : values.names_within("scheduler.params")) {
    parameters[name] = *values.json("scheduler.params." + name);
  }
  // Hugging Face's trainer fills in its warmup_steps, 0 where nobody sets it, which a schedule takes as 2.
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
  config.frozen = values.texts("tranche.frozen");
  LoraConfig& lora = config.lora;
  lora.rank = values.integer("tranche.lora.rank").value_or(lora.rank);
  lora.alpha = values.number("tranche.lora.alpha").value_or(lora.alpha);
  lora.dropout = values.number("tranche.lora.dropout").value_or(lora.dropout);
  lora.rank_scaled = values.boolean("tranche.lora.rslora").value_or(lora.rank_scaled);
  lora.save_base = values.boolean("tranche.lora.save_base").value_or(lora.save_base);
  if (std::vector<std::string> targets = values.texts("tranche.lora.targets"); !targets.empty())
    lora.targets = std::move(targets);
  if (!lora.any() && lora != LoraConfig{}) {
    problems.add(
        "tranche.lora: has no rank, and without adapters its other keys do nothing; give rank, as 8");
  }
  const Json* groups = values.json("tranche.parameter_groups");
  if (groups == nullptr || !groups->is_array()) return;
  for (const Json& group : *groups) {
    ParameterGroupRule rule;
    const auto given = [&](const char* name) {
      return group.is_object() && group.contains(name) && !group[name].is_null();
    };
    // A wrong type has been told already; what has the right one is read.
    if (given("pattern") && group["pattern"].is_string()) rule.pattern = group["pattern"].get<std::string>();
    if (given("learning_rate_factor") && group["learning_rate_factor"].is_number()) {
      rule.learning_rate_factor = group["learning_rate_factor"].get<double>();
    }
    if (given("decay") && group["decay"].is_boolean()) rule.decay = group["decay"].get<bool>();
    const auto number = [&](const char* name, std::optional<double>& into) {
      if (given(name) && group[name].is_number()) into = group[name].get<double>();
    };
    number("learning_rate", rule.learning_rate);
    number("weight_decay", rule.weight_decay);
    number("eps", rule.epsilon);
    if (given("betas") && group["betas"].is_array() &&
        std::all_of(group["betas"].begin(), group["betas"].end(),
                    [](const Json& beta) { return beta.is_number(); })) {
      const auto betas = group["betas"].get<std::vector<double>>();
      if (betas.size() == 2) {
        rule.betas = {betas[0], betas[1]};
      } else {
        problems.add(fmt::format("tranche.parameter_groups: pattern '{}': expected two betas, found {}",
                                 rule.pattern, betas.size()));
      }
    }
    if (rule.learning_rate && config.schedule.type != "constant") {
      config.notes.push_back(
          fmt::format("tranche.parameter_groups: the rate of '{}' is {} in every step; {} does not change it "
                      "(learning_rate_factor follows the schedule)",
                      rule.pattern, *rule.learning_rate, config.schedule.type));
    }
    config.group_rules.push_back(std::move(rule));
  }
}

/// Copies of the sharded state, as tranche's keys or one of DeepSpeed's say.
void read_replicas(const Values& values, Config& config, Problems& problems) {
  const auto replicate = values.text("tranche.replicate");
  if (replicate && *replicate != "all" && *replicate != "parameters") {
    problems.add(fmt::format("tranche.replicate: '{}' is not one of all, parameters", *replicate));
  }
  config.replicate = replicate == "parameters" ? Replicate::parameters : Replicate::all;
  const std::string sum = values.text("tranche.replica_sum").value_or("micro_batch");
  config.replica_sum = sum == "step" ? ReplicaSum::step : ReplicaSum::micro_batch;
  if (sum != "step" && sum != "micro_batch") {
    problems.add(fmt::format("tranche.replica_sum: '{}' is not one of micro_batch, step", sum));
  }
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
    if (replicate == "all") {
      problems.add(
          fmt::format("{}: {} replicates parameters alone, but tranche.replicate is all", hpz, of_hpz));
    }
    config.shard_size_key = hpz;
    config.shard_size = of_hpz;
    config.replicate = Replicate::parameters;
  }
  // A mesh that is given too has to agree, which validation tells once it knows the ranks.
  if (config.shard_size > 0 && config.mesh.empty()) {
    config.mesh = fmt::format("replicate=*, shard={}", config.shard_size);
  }
}

/// The rule of cuts that tranche.pipeline_cuts names; nothing for a list and all else.
std::optional<PipelineCuts> cuts_named(const Json& text) {
  for (const PipelineCuts rule : {PipelineCuts::balanced, PipelineCuts::equal, PipelineCuts::parameters}) {
    if (text == name_of(rule)) return rule;
  }
  return std::nullopt;
}

/// The cuts by DeepSpeed's word for them. tranche.pipeline_cuts, which is read before, may say the same.
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
        "pipeline.partition: best is tranche.pipeline_cuts balanced: the largest share of a stage is the "
        "least that there is, by the operations of forward");
  } else {
    problems.add(fmt::format("pipeline.partition: '{}' is not one of uniform, parameters, best", *given));
    return;
  }
  if (values.has("tranche.pipeline_cuts") && cuts != config.pipeline_cuts) {
    problems.add(
        fmt::format("pipeline.partition: {} is tranche.pipeline_cuts {}, which is {} in the same "
                    "configuration; give one of the two",
                    *given, name_of(cuts), values.json("tranche.pipeline_cuts")->dump()));
    return;
  }
  config.pipeline_cuts = cuts;
  config.pipeline_cuts_key = "pipeline.partition";
}

/// The mesh's axis by DeepSpeed's key, whose stages are the slowest axis too. A mesh that is given beside it
/// has to agree, which validation tells once it knows the ranks.
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

/// How a pipeline cuts the model and orders its work.
void read_pipeline(const Values& values, Config& config, Problems& problems) {
  const std::string tie_sum = values.text("tranche.tie_sum").value_or("together");
  config.tie_sum = tie_sum == "by_use" ? TieSum::by_use : TieSum::together;
  if (tie_sum != "by_use" && tie_sum != "together") {
    problems.add(fmt::format("tranche.tie_sum: '{}' is not one of together, by_use", tie_sum));
  }
  const std::string schedule = values.text("tranche.pipeline_schedule").value_or("1f1b");
  config.pipeline_schedule = schedule == "afab" ? PipelineSchedule::afab : PipelineSchedule::one_f_one_b;
  if (schedule != "afab" && schedule != "1f1b") {
    problems.add(fmt::format("tranche.pipeline_schedule: '{}' is not one of 1f1b, afab", schedule));
  }
  constexpr int most_units = 1 << 20;
  const Json* const cuts = values.json("tranche.pipeline_cuts");
  if (cuts == nullptr) return;
  if (const auto named = cuts_named(*cuts)) {
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
                    "of the first unit of each stage but the first, not {}",
                    cuts->dump()));
  }
}

void read_tranche(const Values& values, Config& config, Problems& problems) {
  read_pipeline(values, config, problems);
  read_partition(values, config, problems);
  const std::string reduction = values.text("tranche.reduction").value_or("auto");
  if (reduction == "boundary") {
    config.reduction = ReductionPolicy::boundary;
  } else if (reduction == "micro_batch") {
    config.reduction = ReductionPolicy::micro_batch;
  } else if (reduction != "auto") {
    problems.add(fmt::format("tranche.reduction: '{}' is not one of auto, boundary, micro_batch", reduction));
  }
  config.world_size_invariant =
      values.boolean("tranche.world_size_invariant").value_or(config.world_size_invariant);
  config.gradient_noise_scale =
      values.boolean("tranche.gradient_noise_scale").value_or(config.gradient_noise_scale);
  config.gradient_noise_smoothing =
      values.number("tranche.gradient_noise_smoothing").value_or(config.gradient_noise_smoothing);
  const std::string gather_for = values.text("tranche.gather_for").value_or("use");
  if (gather_for == "step") {
    config.gather_for = GatherFor::step;
  } else if (gather_for != "use") {
    problems.add(fmt::format("tranche.gather_for: '{}' is not one of use, step", gather_for));
  }
  if (config.gather_for == GatherFor::step && config.stage >= 0 && config.stage < 3) {
    config.notes.push_back(fmt::format(
        "tranche.gather_for: step has no effect: at stage {} every rank has all weights; they are "
        "gathered at stage 3",
        config.stage));
    config.gather_for = GatherFor::use;
  }
  const std::string progress = values.text("tranche.progress").value_or("thread");
  config.inline_progress = progress == "inline";
  if (progress != "thread" && progress != "inline") {
    problems.add(fmt::format("tranche.progress: '{}' is not one of thread, inline", progress));
  }
  config.collectives = values.text("tranche.collectives").value_or(config.collectives);
  config.device_transport = values.text("tranche.device_transport").value_or(config.device_transport);
  config.mesh = values.text("tranche.mesh").value_or(config.mesh);
  const bool mesh_given = !config.mesh.empty();
  read_replicas(values, config, problems);
  read_stages(values, mesh_given, config, problems);
  config.reduction_group = small_integer(values, "tranche.reduction_group", config.reduction_group, problems);
  config.depth = small_integer(values, "tranche.depth", config.depth, problems);
  config.threads = small_integer(values, "tranche.threads", config.threads, problems);
  config.checkpoint_every =
      small_integer(values, "tranche.checkpoint_every", config.checkpoint_every, problems);
  config.communication_timeout =
      values.number("tranche.communication_timeout").value_or(config.communication_timeout);
  config.device_memory_limit = values.size("tranche.device_memory").value_or(config.device_memory_limit);
  config.workspace_bytes = values.size("tranche.workspace").value_or(config.workspace_bytes);
  config.staging_bytes = values.size("tranche.communication_slab").value_or(config.staging_bytes);
  const std::int64_t seed = values.integer("tranche.seed").value_or(static_cast<std::int64_t>(config.seed));
  if (seed < 0) problems.add(fmt::format("tranche.seed: {} is negative", seed));
  config.seed = static_cast<std::uint64_t>(seed);
  config.maximum_consecutive_skips =
      values.integer("tranche.maximum_consecutive_skips").value_or(config.maximum_consecutive_skips);
  config.activation_checkpointing =
      values.boolean("tranche.activation_checkpointing").value_or(config.activation_checkpointing);
  config.vocabulary_chunk = values.integer("tranche.vocabulary_chunk").value_or(config.vocabulary_chunk);
  config.save_buffer = values.boolean("tranche.save_buffer").value_or(config.save_buffer);
  config.total_steps_hint = values.integer("tranche.total_steps").value_or(config.total_steps_hint);
  config.debug.poison_memory =
      values.boolean("tranche.debug.poison_memory").value_or(config.debug.poison_memory);
  config.debug.plan_memory = values.boolean("tranche.debug.plan_memory").value_or(config.debug.plan_memory);
  config.debug.compare_calls =
      values.boolean("tranche.debug.compare_calls").value_or(config.debug.compare_calls);
  config.debug.ranks_per_host =
      small_integer(values, "tranche.debug.ranks_per_host", config.debug.ranks_per_host, problems);
}

/// An element count that may be 0 in DeepSpeed, which stands for the default here.
void read_size(const Values& values, std::initializer_list<const char*> names, std::int64_t& field,
               Config& config, Problems& problems) {
  std::string given;
  for (const char* path : names) {
    const auto value = values.integer(path);
    if (!value) continue;
    if (!given.empty())
      problems.add(fmt::format("{} and {} are two names of one key; write one", given, path));
    given = path;
    if (*value != 0) {
      field = *value;
    } else {
      config.notes.push_back(fmt::format("{}: 0 is taken as {}, the default", path, field));
    }
  }
}

/// An element count that may be 0 and has two names.
void read_count(const Values& values, const char* path, const char* other, std::int64_t& field,
                Problems& problems) {
  const auto integer = [&](const char* name) { return values.integer(name); };
  field = either(values, path, other, integer, problems).value_or(field);
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
  config.train_batch_size = values.integer("train_batch_size").value_or(0);
  config.micro_batch_size = values.integer("train_micro_batch_size_per_gpu").value_or(0);
  config.accumulation_steps = values.integer("gradient_accumulation_steps").value_or(0);
  // A zero in the file is a mistake, not the absence that it stands for in the fields.
  for (const char* path :
       {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}) {
    if (values.integer(path) == 0) problems.add(fmt::format("{}: 0 is not at least 1", path));
  }
  const bool clips = values.is_automatic("gradient_clipping");
  config.gradient_clipping =
      values.number("gradient_clipping").value_or(clips ? config.gradient_clipping : 0);
  config.clipping_given = clips || values.has("gradient_clipping");
  config.steps_per_print = values.integer("steps_per_print").value_or(config.steps_per_print);
  config.wall_clock_breakdown = values.boolean("wall_clock_breakdown").value_or(config.wall_clock_breakdown);
  read_monitor(values, "tensorboard", config.tensorboard);
  read_monitor(values, "csv_monitor", config.csv_monitor);
  read_precision(values, config, problems);
  read_optimizer(values, config, problems);

  config.stage = small_integer(values, "zero_optimization.stage", config.stage, problems);
  config.overlap = values.boolean("zero_optimization.overlap_comm").value_or(config.overlap);
  config.quantized_gradients = values.boolean("zero_optimization.zero_quantized_gradients").value_or(false);
  config.quantized_weights = values.boolean("zero_optimization.zero_quantized_weights").value_or(false);
  const auto size = [&](std::initializer_list<const char*> names, std::int64_t& field) {
    read_size(values, names, field, config, problems);
  };
  size({"zero_optimization.reduce_bucket_size"}, config.reduce_bucket_elements);
  size({"zero_optimization.allgather_bucket_size"}, config.allgather_bucket_elements);
  size({"zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.prefetch_bucket_size"},
       config.prefetch_elements);
  size({"zero_optimization.stage3_max_live_parameters", "zero_optimization.max_live_parameters"},
       config.max_live_elements);
  read_count(values, "zero_optimization.stage3_param_persistence_threshold",
             "zero_optimization.param_persistence_threshold", config.persistent_tensor_elements, problems);
  read_count(values, "zero_optimization.stage3_model_persistence_threshold",
             "zero_optimization.model_persistence_threshold", config.persistent_model_elements, problems);
  read_groups(values, config, problems);
  read_tranche(values, config, problems);
  read_offload(values, config, problems);
  return config;
}

/// The number of ranks that the three figures of the batch are for; where they do not tell it, one for each
/// stage that DeepSpeed's key asks for. (The figures count data ranks.)
int ranks_of_batch(const Config& config) {
  const int stages = std::max(1, config.pipeline_stages);
  const std::int64_t micro = config.micro_batch_size, steps = config.accumulation_steps;
  if (micro < 1 || steps < 1 || config.train_batch_size < 1) return stages;
  // Without their product, which may overflow.
  const std::int64_t of_step = config.train_batch_size / steps, ranks = of_step / micro;
  const bool exact = of_step * steps == config.train_batch_size && ranks * micro == of_step;
  return exact && ranks <= INT32_MAX / stages ? static_cast<int>(ranks) * stages : stages;
}

Reading read_config_text(std::string_view text, std::optional<int> ranks,
                         const std::vector<std::string>& overrides, bool strict, const std::string& origin) {
  Json document = read_json(text, origin);
  Reading reading;
  std::vector<std::string> notes;
  std::vector<IgnoredKey> ignored;
  expand_zero_optimization(document, notes);
  apply_overrides(document, overrides, reading.problems, notes);
  expand_zero_optimization(document, notes);  // an override may be of that form too
  reading.values = check_keys(document, strict, reading.problems, ignored);
  reading.config = config_from(reading.values, reading.problems);
  Config& config = reading.config;
  config.ignored = std::move(ignored);
  config.notes.insert(config.notes.begin(), notes.begin(), notes.end());
  reading.ranks = ranks.value_or(ranks_of_batch(config));
  check_fields(config, reading.ranks, reading.problems);
  if (reading.problems.empty()) note_differences(reading.values, config);
  return reading;
}

}  // namespace detail

namespace {

Config parse(std::string_view text, int ranks, const std::vector<std::string>& overrides, bool strict,
             const std::string& origin) {
  detail::Reading reading = detail::read_config_text(text, ranks, overrides, strict, origin);
  reading.problems.raise(origin);
  return std::move(reading.config);
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

std::string_view name_of(OffloadTier tier) {
  switch (tier) {
    case OffloadTier::none:
      return "none";
    case OffloadTier::cpu:
      return "cpu";
    case OffloadTier::nvme:
      return "nvme";
  }
  return "?";
}

std::string_view name_of(Replicate replicate) {
  return replicate == Replicate::all ? "all" : "parameters";
}

std::string_view name_of(TieSum sum) {
  return sum == TieSum::by_use ? "by_use" : "together";
}

std::string_view name_of(PipelineCuts cuts) {
  switch (cuts) {
    case PipelineCuts::balanced:
      return "balanced";
    case PipelineCuts::equal:
      return "equal";
    case PipelineCuts::parameters:
      return "parameters";
    case PipelineCuts::listed:
      return "listed";
  }
  return "?";
}

std::string_view name_of(PipelineSchedule schedule) {
  return schedule == PipelineSchedule::afab ? "afab" : "1f1b";
}

std::string_view name_of(ReplicaSum sum) {
  return sum == ReplicaSum::micro_batch ? "micro_batch" : "step";
}

std::string_view name_of(ReductionPolicy policy) {
  switch (policy) {
    case ReductionPolicy::automatic:
      return "auto";
    case ReductionPolicy::boundary:
      return "boundary";
    case ReductionPolicy::micro_batch:
      return "micro_batch";
  }
  return "?";
}

std::string_view name_of(MasterFormat format) {
  return format == MasterFormat::fp32 ? "fp32" : format == MasterFormat::split ? "split" : "none";
}
std::string_view name_of(GatherFor gather_for) {
  return gather_for == GatherFor::step ? "step" : "use";
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
