#include "tools/settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/json.h"
#include "core/relaxed_json.h"
#include "core/text_file.h"
#include "tranche/core/error.h"
#include "tranche/device/device.h"

namespace tranche::tools {

namespace {

/// The text of a file as an object to look keys up in; empty where it is not JSON, as reading it will tell.
nlohmann::json keys_of(const std::string& text) {
  try {
    return detail::parse_json(detail::strict_json(text).text);
  } catch (const InvalidArgument&) {
    return {};
  }
}

/// Sets the location of state. Older keys of the file would contradict the flags, so they give way.
void override_offload(const Options& options, const nlohmann::json& document,
                      std::vector<std::string>& overrides) {
  const auto uses = [&](const char* older) {
    return document.is_object() && document.contains("zero_optimization") &&
           document["zero_optimization"].is_object() && document["zero_optimization"].contains(older);
  };
  const auto tier = [&](const char* block, const char* older, const std::optional<std::string>& value) {
    if (!value) return;
    overrides.push_back(fmt::format("zero_optimization.{}.device=\"{}\"", block, *value));
    if (uses(older)) overrides.push_back(fmt::format("zero_optimization.{}=false", older));
  };
  tier("offload_optimizer", "cpu_offload", options.offload_optimizer);
  tier("offload_param", "cpu_offload_param", options.offload_parameters);
  if (options.nvme_path) {
    if (!detail::is_utf8(*options.nvme_path)) {
      throw ConfigurationError(
          fmt::format("--nvme-path '{}' is not UTF-8, as a configuration is; give a folder with another name",
                      *options.nvme_path));
    }
    const std::string path = nlohmann::json(*options.nvme_path).dump();
    overrides.push_back("zero_optimization.offload_optimizer.nvme_path=" + path);
    overrides.push_back("zero_optimization.offload_param.nvme_path=" + path);
  }
  if (options.offload_ratio) {
    overrides.push_back(fmt::format("zero_optimization.offload_optimizer.ratio={}", *options.offload_ratio));
  }
  if (options.offload_activations) {
    overrides.emplace_back("activation_checkpointing.cpu_checkpointing=true");
    overrides.emplace_back("tranche.activation_checkpointing=true");
  }
}

/// Windows that a validation takes; 0: all.
std::int64_t held_out_windows(const Options& options, const Settings& settings) {
  if (options.eval_batches) return *options.eval_batches * settings.batch.step();
  // The n-grams' figures are of the whole held-out text, and `evaluate` has nothing else to do.
  if (options.ngrams || options.command != Command::train) return 0;
  return std::max<std::int64_t>(1, default_validation_tokens / settings.sequence);
}

}  // namespace

DataType compute_dtype(const std::string& name) {
  for (const DataType dtype : {DataType::float32, DataType::bfloat16, DataType::float16}) {
    try {
      if (parse_data_type(name) == dtype) return dtype;
    } catch (const Error&) {
      break;
    }
  }
  throw ConfigurationError(fmt::format("--dtype {} is not one of fp32, bf16, fp16", name));
}

std::vector<std::string> overrides_of(const Options& options, const std::string& config_text) {
  std::vector<std::string> overrides;
  const auto number = [&](const char* key, const auto& value) {
    if (value) overrides.push_back(fmt::format("{}={}", key, *value));
  };
  number("zero_optimization.stage", options.stage);
  number("train_micro_batch_size_per_gpu", options.micro_batch);
  number("gradient_accumulation_steps", options.accumulate);
  number("tranche.seed", options.seed);
  number("tranche.threads", options.threads);
  number("optimizer.params.lr", options.learning_rate);
  if (options.mesh) overrides.push_back(fmt::format("tranche.mesh={}", nlohmann::json(*options.mesh).dump()));
  const auto size = [&](const char* key, const std::optional<std::string>& value) {
    if (!value) return;
    (void)parse_byte_size(*value);  // its error names the accepted forms
    overrides.push_back(fmt::format("{}=\"{}\"", key, *value));
  };
  size("tranche.device_memory", options.device_memory);
  size("tranche.host_memory", options.host_memory);
  size("tranche.nvme_space", options.nvme_space);
  const nlohmann::json document = keys_of(config_text);
  override_offload(options, document, overrides);
  // The memory of saves is there from the start, so that the report's peak does not depend on whether one
  // came.
  if (!options.checkpoint_dir.empty()) overrides.emplace_back("tranche.save_buffer=true");
  if (options.dtype) {
    const DataType dtype = compute_dtype(*options.dtype);
    // Two names of one key are refused, so the one that the file uses is replaced.
    const bool older = document.is_object() && document.contains("bfloat16");
    overrides.push_back(
        fmt::format("{}.enabled={}", older ? "bfloat16" : "bf16", dtype == DataType::bfloat16));
    overrides.push_back(fmt::format("fp16.enabled={}", dtype == DataType::float16));
  }
  overrides.insert(overrides.end(), options.set.begin(), options.set.end());
  return overrides;
}

std::string default_configuration(const Options& options) {
  nlohmann::json json = {{"bf16", {{"enabled", true}}},
                         {"data_types", {{"grad_accum_dtype", "fp32"}}},
                         {"gradient_clipping", 1.0},
                         {"optimizer", {{"type", "AdamW"}}}};
  // Not beside another name of that key, nor beside fp16.
  for (const std::string& set : options.set) {
    if (set.starts_with("bfloat16") || set == "fp16.enabled=true" || set.starts_with("fp16={"))
      json.erase("bf16");
  }
  return json.dump();
}

Config read_config(const Options& options, int ranks) {
  const bool given = !options.config.empty();
  // Read once: it may be a pipe.
  const std::string text =
      given ? detail::read_text_file(options.config, "configuration file", detail::Pipes::allowed)
            : default_configuration(options);
  const std::string origin =
      given ? fmt::format("configuration file '{}'", options.config) : std::string("configuration");
  const Config config = parse_config(text, ranks, overrides_of(options, text), options.strict, origin);
  // In a file it may be a habit without effect; on the command line it was asked for.
  if (options.offload_parameters.value_or("none") != "none" && config.stage != 3) {
    throw ConfigurationError(fmt::format(
        "--offload-param {} needs zero_optimization.stage 3, where weights are sharded and come when "
        "they are used; the stage is {}",
        *options.offload_parameters, config.stage));
  }
  return config;
}

Settings resolve_settings(const Options& options, int ranks) {
  Settings settings;
  settings.config = read_config(options, ranks);
  Config& config = settings.config;
  settings.model = options.models.resolve(options.model);
  settings.sequence = options.sequence.value_or(settings.model->shape().positions);
  settings.model->require_sequence(settings.sequence);
  settings.steps = options.steps.value_or(config.total_steps_hint > 0 ? config.total_steps_hint : 100);
  if (config.total_steps_hint == 0) config.total_steps_hint = settings.steps;
  (void)make_schedule(config);
  settings.batch = {config.micro_batch_size, config.accumulation_steps, ranks};
  // Made and let go: a device that is not there is told before anything else is started.
  if (options.device == "cuda") (void)make_device({DeviceKind::cuda, 0, 1});
  return settings;
}

Data open_data(const Options& options, const Settings& settings) {
  if (options.data.empty()) throw ConfigurationError("no data: give --data a text file or a file of tokens");
  const data::DataFormat format = data::parse_data_format(options.data_format);
  Data data;
  data.training_file = std::make_unique<data::TokenFile>(options.data, format);
  const data::TokenFile& file = *data.training_file;
  data.training_range = {&file, 0, file.size()};
  if (!options.validation_data.empty()) {
    data.validation_file = std::make_unique<data::TokenFile>(options.validation_data, format);
    data.validation_range = {data.validation_file.get(), 0, data.validation_file->size()};
  } else {
    const auto held_out = static_cast<std::int64_t>(
        std::llround(static_cast<double>(file.size()) * options.validation_fraction));
    data.training_range.size = file.size() - held_out;
    data.validation_range = {&file, file.size() - held_out, held_out};
  }
  const auto look_through = [&](const data::TokenFile& each) {
    each.require_within(settings.model->shape().vocabulary, (std::int64_t{1} << 30) / each.width());
  };
  look_through(file);
  if (data.validation_file) look_through(*data.validation_file);
  data.training = std::make_unique<data::Windows>(data.training_range, settings.sequence, "training");
  data.validation = std::make_unique<data::Windows>(data.validation_range, settings.sequence, "validation");
  data.evaluation = data::evaluation_windows(data.validation->count(), held_out_windows(options, settings));
  if ((options.ngrams || options.sample_bytes > 0) &&
      (!data.text() || settings.model->shape().vocabulary < 256)) {
    throw ConfigurationError(
        fmt::format("--ngrams and --sample-bytes are for text, of which every byte is a token; '{}' is read "
                    "as {}, and the model's vocabulary is {}",
                    options.data, data::name_of(file.format()), settings.model->shape().vocabulary));
  }
  return data;
}

RunIdentity identity_of(const Options& options, const Settings& settings, const Data& data) {
  Tokenizer tokenizer;
  if (!data.text()) tokenizer = {Tokenizer::Kind::tokens, settings.model->shape().vocabulary};
  return {settings.model,
          settings.sequence,
          tokenizer,
          options.data,
          data.training->count(),
          data.validation->count(),
          data.training_file->digest(),
          data.validation_file ? data.validation_file->digest() : ""};
}

}  // namespace tranche::tools
