#include "tranche/tools/settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tranche/core/error.h"
#include "tranche/device/device.h"
#include "tranche/models/gpt.h"

namespace tranche::tools {

namespace {

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  return text.str();
}

}  // namespace

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
  if (options.device_memory) {
    (void)parse_byte_size(*options.device_memory);  // its error names the accepted forms
    overrides.push_back(fmt::format("tranche.device_memory=\"{}\"", *options.device_memory));
  }
  if (options.dtype) {
    const DataType dtype = parse_data_type(*options.dtype);
    if (dtype != DataType::float32 && dtype != DataType::bfloat16 && dtype != DataType::float16) {
      throw ConfigurationError(fmt::format("--dtype {} is not one of fp32, bf16, fp16", *options.dtype));
    }
    // Two names of one key are refused, so the one that the file uses is replaced.
    const auto document = nlohmann::json::parse(config_text, nullptr, false);
    const bool older = document.is_object() && document.contains("bfloat16");
    overrides.push_back(
        fmt::format("{}.enabled={}", older ? "bfloat16" : "bf16", dtype == DataType::bfloat16));
    overrides.push_back(fmt::format("fp16.enabled={}", dtype == DataType::float16));
  }
  overrides.insert(overrides.end(), options.set.begin(), options.set.end());
  return overrides;
}

Settings resolve_settings(const Options& options, int ranks) {
  Settings settings;
  if (options.config.empty()) {
    settings.config = parse_config("{}", ranks, overrides_of(options, "{}"));
  } else {
    settings.config = load_config(options.config, ranks, overrides_of(options, read_text(options.config)));
  }
  Config& config = settings.config;
  settings.model = models::GptConfig::resolve(options.model);
  settings.sequence = options.sequence.value_or(settings.model.positions);
  settings.model.require_sequence(settings.sequence);
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
  const DataFormat format = parse_data_format(options.data_format);
  Data data;
  data.training_file = std::make_unique<TokenFile>(options.data, format);
  const TokenFile& file = *data.training_file;
  data.training_range = {&file, 0, file.size()};
  if (!options.validation_data.empty()) {
    data.validation_file = std::make_unique<TokenFile>(options.validation_data, format);
    data.validation_range = {data.validation_file.get(), 0, data.validation_file->size()};
  } else {
    const auto held_out = static_cast<std::int64_t>(
        std::llround(static_cast<double>(file.size()) * options.validation_fraction));
    data.training_range.size = file.size() - held_out;
    data.validation_range = {&file, file.size() - held_out, held_out};
  }
  constexpr std::int64_t looked_through = std::int64_t{1} << 29;  // tokens of two bytes
  file.require_within(settings.model.vocabulary, looked_through);
  if (data.validation_file) data.validation_file->require_within(settings.model.vocabulary, looked_through);
  data.training = std::make_unique<Windows>(data.training_range, settings.sequence, "training");
  data.validation = std::make_unique<Windows>(data.validation_range, settings.sequence, "validation");
  data.evaluation =
      evaluation_windows(data.validation->count(), options.eval_batches * settings.batch.step());
  if ((options.ngrams || options.sample_bytes > 0) && (!data.text() || settings.model.vocabulary < 256)) {
    throw ConfigurationError(
        fmt::format("--ngrams and --sample-bytes are for text, of which every byte is a token; '{}' is read "
                    "as {}, and the model's vocabulary is {}",
                    options.data, name_of(file.format()), settings.model.vocabulary));
  }
  return data;
}

}  // namespace tranche::tools
