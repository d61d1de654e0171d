// Adds a note for each setting of a DeepSpeed file that has a different effect here.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "config/keys.h"
#include "config/reader.h"
#include "core/json.h"
#include "tranche/optim/rules.h"

namespace tranche::detail {
namespace {

/// Blocks and keys that affect results; "auto" for other keys is not noted.
constexpr std::array<std::string_view, 9> arithmetic{"train_",      "gradient_",  "communication_data_type",
                                                     "data_types.", "bf16.",      "bfloat16.",
                                                     "fp16.",       "optimizer.", "scheduler."};

/// A key's value as the effective configuration writes it, or the default of the table.
std::string value_of(const std::string& given, const Json& effective) {
  const std::string path = given.starts_with("bfloat16.") ? "bf16" + given.substr(8) : given;
  std::string pointer = "/" + path;
  std::replace(pointer.begin(), pointer.end(), '.', '/');
  const Json::json_pointer place(pointer);
  if (effective.contains(place)) return effective[place].dump();
  return std::string(find_configuration_key(path)->default_value);
}

/// Adds notes for keys that the trainer fills in from its own arguments. These are unknown here, and their
/// usual value differs from the default.
void note_unknown(const Values& values, Config& config) {
  const auto note = [&](const char* path, const std::string& taken, const char* argument, const char* way) {
    if (!values.is_automatic(path)) return;
    config.notes.push_back(fmt::format("{}: \"auto\" is {}, as the trainer's {} is not known here; {}", path,
                                       taken, argument, way));
  };
  note("optimizer.params.lr", fmt::format("{}", config.optimizer.learning_rate), "learning_rate",
       "write the rate, or give --lr");
  note("scheduler.params.warmup_num_steps", "no warm-up", "warmup_steps or warmup_ratio", "write the steps");
  if (!values.has("train_batch_size")) {
    note("train_micro_batch_size_per_gpu", fmt::format("{}", config.micro_batch_size),
         "per_device_train_batch_size", "write the samples, or give --micro-batch");
  }
}

void note_automatic(const Values& values, Config& config) {
  std::string text;
  const Json effective = Json::parse(config.to_json());
  for (const std::string& path : values.automatic_paths()) {
    const bool matters = std::any_of(arithmetic.begin(), arithmetic.end(),
                                     [&](std::string_view begin) { return path.starts_with(begin); });
    const bool idle = path.starts_with("fp16.") && path != "fp16.enabled" && !config.loss_scaling;
    if (!matters || idle) continue;
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", path, value_of(path, effective));
  }
  if (text.empty()) return;
  config.notes.push_back("\"auto\", which Hugging Face's trainer fills in, is " + text);
  note_unknown(values, config);
}

void note_precision(const Values& values, Config& config) {
  const PrecisionConfig& precision = config.precision;
  if (precision.compute != DataType::float32 && precision.accumulation == DataType::float32 &&
      !values.has("data_types.grad_accum_dtype")) {
    config.notes.push_back(fmt::format(
        "data_types.grad_accum_dtype: not given: reduced gradients are kept in fp32 (DeepSpeed: {})",
        name_of(precision.compute)));
  }
  if (!values.has("gradient_clipping") && !values.is_automatic("gradient_clipping")) {
    config.notes.emplace_back(
        "gradient_clipping: not given: gradients are not clipped (DeepSpeed since June 2026: at 1.0)");
  }
}

void note_fixed_scale(const Values& values, Config& config) {
  if (!config.loss_scaling || config.loss_scaler.dynamic) return;
  std::string given;
  for (const char* name : {"initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis",
                           "min_loss_scale"}) {
    const std::string path = std::string("fp16.") + name;
    if (values.has(path)) given += (given.empty() ? "" : ", ") + path;
  }
  if (given.empty()) return;
  config.notes.push_back(fmt::format("{}: no effect: fp16.loss_scale fixes the scale at {}", given,
                                     config.loss_scaler.initial_scale));
}

void note_optimizer(const Values& values, Config& config) {
  const OptimizerConfig& optimizer = config.optimizer;
  if (!values.has("optimizer.type")) {
    config.notes.push_back(fmt::format(
        "optimizer.type: not given: {} with a learning rate of {} (DeepSpeed takes the program's optimizer)",
        optimizer.type, optimizer.learning_rate));
  }
  const RuleType* const type = find_rule(optimizer.type);
  if (type != nullptr && type->rule->whole_matrices) {
    if (!optimizer.parameters.contains("adjust_lr_fn")) {
      config.notes.emplace_back(
          "optimizer.params.adjust_lr_fn: not given: match_rms_adamw, with which AdamW's rate fits matrices "
          "too "
          "(DeepSpeed: original)");
    }
  } else if (type != nullptr) {
    for (const RuleOption& option : type->rule->options) {
      if (std::isfinite(option.first) || optimizer.parameters.contains(option.name)) continue;
      config.notes.push_back(
          fmt::format("optimizer.params.{}: not given: off: {}", option.name, option.meaning));
    }
  }
  const bool decays_all =
      std::any_of(config.group_rules.begin(), config.group_rules.end(),
                  [](const auto& rule) { return rule.pattern == "*" && rule.decay == true; });
  const auto decay = optimizer.parameters.find("weight_decay");
  if (decay != optimizer.parameters.end() && decay->second.first != 0 && !decays_all) {
    config.notes.emplace_back(
        "optimizer.params.weight_decay: tensors of less than two dimensions (biases, norms) do not decay "
        "(DeepSpeed: all do); tranche.decay: [\"*\"] decays them too");
  }
}

void note_schedule(const Values& values, Config& config) {
  const std::string& type = config.schedule.type;
  if (type == "constant") return;
  config.notes.emplace_back(
      "scheduler: step 1 has its first rate (DeepSpeed: step 1 has the rate from before it began, and each "
      "after that the rate that the step before has here)");
  if (type == "WarmupDecayLR" && !values.has("scheduler.params.warmup_max_lr") &&
      !values.is_automatic("scheduler.params.warmup_max_lr") && config.optimizer.learning_rate != 0.001) {
    config.notes.push_back(
        fmt::format("scheduler.params.warmup_max_lr: not given: the optimizer's rate, {} (DeepSpeed: 0.001)",
                    config.optimizer.learning_rate));
  }
  if (type == "OneCycle" && values.boolean("scheduler.params.cycle_momentum").value_or(true)) {
    const std::vector<std::string> names = optimizer_parameters(config.optimizer.type);
    config.notes.push_back(
        std::find(names.begin(), names.end(), "betas") == names.end()
            ? fmt::format("scheduler.params.cycle_momentum: no meaning here: {} has no beta1 to cycle",
                          config.optimizer.type)
            : "scheduler.params.cycle_momentum: beta2 stays the optimizer's (DeepSpeed sets "
              "it to 0.99 while it cycles)");
  }
}

void note_axes(const Values& values, Config& config) {
  if (config.tie_sum == TieSum::by_use && values.text("tranche.tie_sum") == "together") {
    config.notes.emplace_back(
        "tranche.tie_sum: together is taken as by_use: the stages of a pipeline add each use's gradients");
  }
  const auto lacks = [&](const char* path, MeshAxis axis) {
    return values.is_automatic(path) && config.mesh.find(name_of(axis)) == std::string::npos;
  };
  if (lacks("pipeline.stages", MeshAxis::pipeline)) {
    config.notes.emplace_back("pipeline.stages: \"auto\" is 1: write the number of stages for a pipeline");
  }
  if (lacks("sequence_parallel_size", MeshAxis::context)) {
    config.notes.emplace_back(
        "sequence_parallel_size: \"auto\" is 1: write the number of ranks that share each sequence");
  }
  if (lacks("tensor_parallel.autotp_size", MeshAxis::tensor)) {
    config.notes.emplace_back(
        "tensor_parallel.autotp_size: \"auto\" is 1: write the number of ranks that share layers");
  }
}

/// A key that is given and has no effect, and the reason.
struct IdleKey {
  std::string path;
  std::string_view why;
};

/// True if some tensor may decay.
bool decays(const Config& config) {
  for (const ParameterGroupRule& rule : config.group_rules) {
    if (rule.weight_decay.value_or(0) != 0) return true;
  }
  const auto given = config.optimizer.parameters.find("weight_decay");
  if (given != config.optimizer.parameters.end()) return given->second.first != 0;
  const RuleType* const type = find_rule(config.optimizer.type);
  return type != nullptr &&
         std::any_of(type->rule->options.begin(), type->rule->options.end(), [](const RuleOption& option) {
           return option.name == "weight_decay" && option.first != 0;
         });
}

/// The keys that are given, with other values than the defaults, and have no effect beside the others.
std::vector<IdleKey> idle_keys(const Values& values, const Config& config, int ranks) {
  std::vector<IdleKey> idle;
  const auto add = [&](bool used, std::initializer_list<const char*> paths, std::string_view why) {
    for (const char* const path : paths) {
      const Json* const given = used ? nullptr : values.json(path);
      if (given == nullptr) continue;
      const Json usual = parse_json(find_configuration_key(path)->default_value);
      // A default in words is what 0 and an empty text stand for.
      const bool asks = usual.is_discarded() ? *given != 0 && *given != "" : *given != usual;
      if (asks) idle.push_back({path, why});
    }
  };
  const OffloadConfig& offload = config.offload;
  add(config.tensorboard.enabled, {"tensorboard.output_path", "tensorboard.job_name"},
      "tensorboard.enabled is not true");
  add(config.csv_monitor.enabled, {"csv_monitor.output_path", "csv_monitor.job_name"},
      "csv_monitor.enabled is not true");
  add(config.activation_checkpointing, {"tranche.checkpoint_every"},
      "tranche.activation_checkpointing is not true");
  add(config.loss_scaling,
      {"fp16.loss_scale", "fp16.initial_scale_power", "fp16.loss_scale_window", "fp16.hysteresis",
       "fp16.consecutive_hysteresis", "fp16.min_loss_scale"},
      "losses are scaled in fp16 alone");
  add(config.gradient_noise_scale, {"tranche.gradient_noise_smoothing"},
      "tranche.gradient_noise_scale is not true");
  add(config.mesh_of(ranks).size(MeshAxis::replicate) > 1, {"tranche.replica_sum"},
      "the mesh has no axis replicate");
  add(config.stage == 3,
      {"zero_optimization.stage3_param_persistence_threshold",
       "zero_optimization.stage3_model_persistence_threshold"},
      "it is for stage 3");
  add(offload.optimizer != OffloadTier::none || offload.ratio == 0,
      {"zero_optimization.offload_optimizer.ratio"}, "the optimizer's state stays on the device");
  add(offload.uses_nvme(),
      {"zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.nvme_path",
       "aio.block_size", "aio.queue_depth", "tranche.host_state", "tranche.nvme_space"},
      "nothing is on nvme");
  add(decays(config), {"tranche.decay", "tranche.no_decay"}, "there is no weight decay");
  return idle;
}

}  // namespace

bool is_overridden(std::string_view path, const std::vector<std::string>& overrides) {
  const auto is_within = [](std::string_view inner, std::string_view outer) {
    return inner.starts_with(outer) && (inner.size() == outer.size() || inner[outer.size()] == '.');
  };
  return std::any_of(overrides.begin(), overrides.end(), [&](const std::string& text) {
    const std::string_view given = std::string_view(text).substr(0, text.find('='));
    return is_within(path, given) || is_within(given, path);
  });
}

void note_idle_keys(const Values& values, const std::vector<std::string>& overrides, int ranks,
                    Config& config) {
  constexpr std::size_t most_names = 3;
  std::vector<std::string> of_file;
  for (const IdleKey& key : idle_keys(values, config, ranks)) {
    if (is_overridden(key.path, overrides)) {
      config.notes.push_back(fmt::format("{} has no effect: {}", key.path, key.why));
      continue;
    }
    // Files carry whole blocks that they switch off, or leave to Hugging Face's trainer.
    const std::string enabled = key.path.substr(0, key.path.find('.')) + ".enabled";
    if (!values.has(enabled) && !values.is_automatic(enabled)) of_file.push_back(key.path);
  }
  if (of_file.empty()) return;
  const std::size_t shown = std::min(of_file.size(), most_names);
  config.notes.push_back(
      fmt::format("{} no effect beside the other keys: {}{}",
                  of_file.size() == 1 ? "1 key has" : fmt::format("{} keys have", of_file.size()),
                  fmt::join(of_file.begin(), of_file.begin() + static_cast<std::ptrdiff_t>(shown), ", "),
                  shown < of_file.size() ? fmt::format(" and {} more", of_file.size() - shown) : ""));
}

std::string value_of_automatic(const std::string& path, const Config& config) {
  return value_of(path, Json::parse(config.to_json()));
}

void note_differences(const Values& values, Config& config) {
  note_automatic(values, config);
  note_precision(values, config);
  note_fixed_scale(values, config);
  note_optimizer(values, config);
  note_schedule(values, config);
  note_axes(values, config);
}

}  // namespace tranche::detail
