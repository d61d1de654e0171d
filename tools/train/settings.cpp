#include "tools/train/settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <map>
#include <nlohmann/json.hpp>
#include <span>

#include "checkpoint/digest.h"
#include "core/json.h"
#include "core/relaxed_json.h"
#include "core/text_file.h"
#include "models/config_json.h"
#include "tools/flag_values.h"
#include "tools/train/tokenizer_match.h"
#include "tranche/core/error.h"
#include "tranche/device/device.h"
#include "tranche/training/tokenize.h"

namespace tranche::tools {

namespace {

/// The text of a file as an object in which keys can be looked up; empty if it is not JSON, which is reported
/// when it is read.
nlohmann::json keys_of(const std::string& text) {
  try {
    return detail::parse_json(detail::strict_json(text).text);
  } catch (const InvalidArgument&) {
    return {};
  }
}

/// Collects overrides of the configuration in the order of the command line: each flag behind the values of
/// --set that stand in front of it.
class Overrides {
 public:
  explicit Overrides(const Options& options) : options_(options), behind_(options.set.size() + 1) {}

  void add(std::string_view flag, std::string text) {
    const auto before = options_.sets_before.find(flag);
    const std::size_t sets = before == options_.sets_before.end() ? 0 : before->second;
    behind_[std::min(sets, options_.set.size())].push_back(std::move(text));
  }
  std::vector<std::string> in_order() const {
    std::vector<std::string> all = options_.of_checkpoint;
    for (std::size_t i = 0; i < behind_.size(); ++i) {
      all.insert(all.end(), behind_[i].begin(), behind_[i].end());
      if (i < options_.set.size()) all.push_back(options_.set[i]);
    }
    return all;
  }

 private:
  const Options& options_;
  std::vector<std::vector<std::string>> behind_;  ///< flags behind none, one, two, ... of the --set
};

/// Sets the location of state. Older keys in the file that would contradict the flags are removed.
void override_offload(const Options& options, const nlohmann::json& document, Overrides& overrides) {
  const auto uses = [&](const char* older) {
    return document.is_object() && document.contains("zero_optimization") &&
           document["zero_optimization"].is_object() && document["zero_optimization"].contains(older);
  };
  const auto tier = [&](const char* flag, const char* block, const char* older,
                        const std::optional<std::string>& value) {
    if (!value) return;
    overrides.add(flag, fmt::format("zero_optimization.{}.device=\"{}\"", block, *value));
    if (uses(older)) overrides.add(flag, fmt::format("zero_optimization.{}=false", older));
  };
  tier("--offload-optimizer", "offload_optimizer", "cpu_offload", options.offload_optimizer);
  tier("--offload-param", "offload_param", "cpu_offload_param", options.offload_parameters);
  if (options.nvme_path) {
    if (!detail::is_utf8(*options.nvme_path)) {
      throw ConfigurationError(
          fmt::format("--nvme-path '{}' is not UTF-8, as a configuration is; give a folder with another name",
                      *options.nvme_path));
    }
    const std::string path = nlohmann::json(*options.nvme_path).dump();
    overrides.add("--nvme-path", "zero_optimization.offload_optimizer.nvme_path=" + path);
    overrides.add("--nvme-path", "zero_optimization.offload_param.nvme_path=" + path);
  }
  if (options.offload_ratio) {
    overrides.add("--offload-ratio",
                  fmt::format("zero_optimization.offload_optimizer.ratio={}", *options.offload_ratio));
  }
  if (options.offload_activations) {
    overrides.add("--offload-activations", "activation_checkpointing.cpu_checkpointing=true");
    overrides.add("--offload-activations", "tranche.activation_checkpointing=true");
  }
}

/// The number of windows of a validation; 0: all.
std::int64_t held_out_windows(const Options& options, const Settings& settings) {
  if (options.eval_batches) return *options.eval_batches * settings.config.train_batch_size;
  // The n-grams' figures are for the whole held-out text, and `evaluate` has no other work.
  if (options.ngrams || options.command != Command::train) return 0;
  return std::max<std::int64_t>(1, default_validation_tokens / settings.sequence);
}

}  // namespace

std::vector<std::string> overrides_of(const Options& options, const std::string& config_text) {
  Overrides overrides(options);
  const auto number = [&](const char* flag, const char* key, const auto& value) {
    if (value) overrides.add(flag, fmt::format("{}={}", key, *value));
  };
  number("--stage", "zero_optimization.stage", options.stage);
  number("--micro-batch", "train_micro_batch_size_per_gpu", options.micro_batch);
  number("--accumulate", "gradient_accumulation_steps", options.accumulate);
  number("--seed", "tranche.seed", options.seed);
  number("--threads", "tranche.threads", options.threads);
  number("--lr", "optimizer.params.lr", options.learning_rate);
  if (options.mesh)
    overrides.add("--mesh", fmt::format("tranche.mesh={}", nlohmann::json(*options.mesh).dump()));
  const auto size = [&](const char* flag, const char* key, const std::optional<std::string>& value) {
    if (!value) return;
    (void)parse_byte_size(*value);  // its error names the accepted forms
    overrides.add(flag, fmt::format("{}=\"{}\"", key, *value));
  };
  size("--device-memory", "tranche.device_memory", options.device_memory);
  size("--host-memory", "tranche.host_memory", options.host_memory);
  if (options.host_state == "auto") {
    overrides.add("--host-state", "tranche.host_state=\"auto\"");
  } else {
    size("--host-state", "tranche.host_state", options.host_state);
  }
  size("--nvme-space", "tranche.nvme_space", options.nvme_space);
  const nlohmann::json document = keys_of(config_text);
  override_offload(options, document, overrides);
  // The buffer for saves is allocated at the start, so that the report's peak does not depend on whether one
  // happened. --set may do without it, wherever it stands.
  if (!options.checkpoint_dir.empty()) overrides.add("", "tranche.save_buffer=true");
  if (options.dtype) {
    const DataType dtype = dtype_of_flag(*options.dtype);
    // Two names of one key are refused, so the flag replaces the name that the file uses.
    const bool older = document.is_object() && document.contains("bfloat16");
    overrides.add("--dtype",
                  fmt::format("{}.enabled={}", older ? "bfloat16" : "bf16", dtype == DataType::bfloat16));
    overrides.add("--dtype", fmt::format("fp16.enabled={}", dtype == DataType::float16));
  }
  return overrides.in_order();
}

std::string default_configuration(const Options& options) {
  nlohmann::json json = {{"bf16", {{"enabled", true}}},
                         {"data_types", {{"grad_accum_dtype", "fp32"}}},
                         {"gradient_clipping", 1.0},
                         {"optimizer", {{"type", "AdamW"}}}};
  // It is not added beside another name of that key, nor beside fp16.
  for (const std::string& set : options.set) {
    if (set.starts_with("bfloat16") || set == "fp16.enabled=true" || set.starts_with("fp16={"))
      json.erase("bf16");
  }
  return json.dump();
}

namespace {

/// Reads a configuration. Standard input, and a pipe, may be empty because another rank has read them.
std::string read_config_text(const std::string& path) {
  std::string text = detail::read_text_file(path, "configuration file", detail::Pipes::allowed);
  std::error_code unknown;
  const bool pipe = path == "/dev/stdin" || std::filesystem::is_fifo(path, unknown);
  if (pipe && text.find_first_not_of(" \t\r\n") == std::string::npos) {
    throw ConfigurationError(fmt::format(
        "configuration file '{}' is empty; under mpirun rank 0 alone has standard input, and one rank alone "
        "reads a pipe: write the configuration to a file, and give that",
        path));
  }
  return text;
}

}  // namespace

Config read_config(const Options& options, int ranks) {
  const bool given = !options.config.empty();
  if (given && options.config_text->first != options.config) {
    *options.config_text = {options.config, read_config_text(options.config)};
  }
  const std::string text = given ? options.config_text->second : default_configuration(options);
  const std::string origin =
      given ? fmt::format("configuration file '{}'", options.config) : std::string("configuration");
  Config config = parse_config(text, ranks, overrides_of(options, text), options.strict, origin);
  if (!given) {  // keys of the program's own configuration are nobody's loss
    std::erase_if(config.notes, [](const std::string& note) {
      return note.find(" replaces the whole block, and so removes ") != std::string::npos;
    });
  }
  // In a file the key may be a leftover without effect; on the command line the user requested it.
  if (options.offload_parameters.value_or("none") != "none" && config.stage != 3) {
    throw ConfigurationError(fmt::format(
        "--offload-param {} needs zero_optimization.stage 3, where weights are sharded and come when "
        "they are used; the stage is {}",
        *options.offload_parameters, config.stage));
  }
  return config;
}

std::int64_t sequence_of(std::optional<std::int64_t> asked, const models::LanguageModel& model,
                         std::vector<std::string>& notes) {
  const std::int64_t positions = model.shape().positions;
  const std::int64_t sequence = asked.value_or(std::min(default_sequence, positions));
  model.require_sequence(sequence);
  if (!asked && sequence < positions) {
    notes.push_back(fmt::format(
        "--sequence: not given: sequences of {} tokens, of the {} that the model has positions for", sequence,
        positions));
  }
  return sequence;
}

namespace {

/// The reason why the configuration's schedule does not follow the learning rate; empty if it does.
std::string reason_without_rate(const Config& config) {
  const std::string& type = config.schedule.type;
  const auto parameters = detail::parse_json(config.schedule.parameters_json);
  if (type == "OneCycle" || type == "LRRangeTest") {
    return fmt::format("{} takes its rates from scheduler.params.{}", type,
                       type == "OneCycle" ? "cycle_min_lr and cycle_max_lr" : "lr_range_test_min_lr");
  }
  if ((type == "WarmupLR" || type == "WarmupDecayLR") && parameters.contains("warmup_max_lr")) {
    return fmt::format("{} rises to scheduler.params.warmup_max_lr, which is {}", type,
                       parameters["warmup_max_lr"].dump());
  }
  const auto& given = config.optimizer.parameters;
  if (given.contains("muon_lr") && given.contains("adam_lr"))
    return "optimizer.params.muon_lr and adam_lr are the rates of all tensors";
  return {};
}

/// Adds to the notes a line for each flag that has no effect beside the others, in place of the lines about
/// its keys, or that was given several times.
void note_flags(const Options& options, Config& config) {
  std::vector<std::string> notes = options.notes;
  const auto note = [&](bool idle, const char* flag, std::string_view why,
                        std::initializer_list<std::string_view> keys = {}) {
    const bool given = std::any_of(options.flags.begin(), options.flags.end(), [&](const Flag& each) {
      return each.name == flag && each.value != "not given";
    });
    if (!given || !idle) return;
    notes.push_back(fmt::format("{} has no effect: {}", flag, why));
    std::erase_if(config.notes, [&](const std::string& line) {
      return std::any_of(keys.begin(), keys.end(), [&](std::string_view key) {
        return line.starts_with(fmt::format("{} has no effect: ", key));
      });
    });
  };
  const OffloadConfig& offload = config.offload;
  note(!options.validation_data.empty(), "--validation-fraction", "--validation-data is held out");
  note(options.max_seconds == 0, "--min-steps", "it is for runs that --max-seconds ends");
  note(options.keep_last == 0, "--keep-every", "without --keep-last every checkpoint is kept");
  if (options.keep_last > 0 && options.keep_every > 0 && options.save_every > 0 &&
      options.keep_every % options.save_every != 0) {
    notes.push_back(
        fmt::format("--keep-every {} keeps multiples of --save-every {} alone: other steps are not saved",
                    options.keep_every, options.save_every));
  }
  const std::string without_rate = reason_without_rate(config);
  note(!without_rate.empty(), "--lr", without_rate);
  note(!options.from.empty(), "--seed", "the weights are those of --from");
  note(offload.optimizer == OffloadTier::none, "--offload-ratio", "the optimizer's state stays on the device",
       {"zero_optimization.offload_optimizer.ratio"});
  note(!offload.uses_nvme(), "--host-state", "nothing is on nvme", {"tranche.host_state"});
  note(!offload.uses_nvme() && !options.fit, "--nvme-space", "nothing is on nvme", {"tranche.nvme_space"});
  note(!offload.uses_nvme(), "--nvme-path", "nothing is on nvme",
       {"zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.nvme_path"});
  note(options.resume.empty() && options.resume_weights_only.empty() && options.from.empty(), "--base",
       "no checkpoint is read");
  config.notes.insert(config.notes.end(), notes.begin(), notes.end());
}

}  // namespace

std::vector<std::string> notes_on_model(const std::string& path, const models::LanguageModel& model) {
  std::error_code unknown;
  if (!std::filesystem::is_regular_file(path, unknown)) return {};
  return models::notes_on_keys(detail::read_text_file(path, "a model's config.json"), path, model.to_json());
}

Settings resolve_settings(const Options& options, int ranks) {
  Settings settings;
  settings.config = read_config(options, ranks);
  Config& config = settings.config;
  settings.model = options.models.resolve(options.model);
  settings.sequence = sequence_of(options.sequence, *settings.model, config.notes);
  settings.steps = options.steps.value_or(config.total_steps_hint > 0 ? config.total_steps_hint : 100);
  if (config.total_steps_hint == 0) config.total_steps_hint = settings.steps;
  (void)make_schedule(config);
  if (options.command == Command::train) {
    const std::vector<std::string> notes = schedule_notes(config, settings.steps);
    config.notes.insert(config.notes.end(), notes.begin(), notes.end());
  }
  const std::vector<std::string> keys = notes_on_model(options.model, *settings.model);
  config.notes.insert(config.notes.end(), keys.begin(), keys.end());
  note_flags(options, config);
  settings.batch = {config.micro_batch_size, config.accumulation_steps, config.data_ranks(ranks)};
  // The device is made and destroyed, so that a missing one is reported before anything else is started.
  if (options.device == "cuda") (void)make_device({DeviceKind::cuda, 0, 1});
  return settings;
}

namespace {

/// One --data flag: files that follow each other, and their weight in a mixture.
struct DataSource {
  std::string text;
  std::vector<std::string> files;
  std::optional<double> weight;
};

/// Calls `read`. Its error also names `other`, such as another interpretation of a flag's value.
template <typename Read>
auto with_reading(const Read& read, std::string_view other) {
  try {
    return read();
  } catch (const ConfigurationError& problem) {
    throw ConfigurationError(fmt::format("{}; {}", problem.message(), other));
  }
}

/// True if a file has this name, or some file matches it as a pattern.
bool names_a_file(const std::string& text) {
  std::error_code unknown;
  if (std::filesystem::exists(text, unknown)) return true;
  const bool pattern = text.find_first_of("*?[") != std::string::npos;
  return pattern && !training::files_of_pattern(text).empty();
}

/// The files of a flag's value read as a path, if no part of it can be anything else.
std::vector<std::string> existing_files(const std::string& path) {
  std::vector<std::string> files = training::expand_pattern(path);
  std::error_code unknown;
  if (!std::filesystem::exists(files.front(), unknown) && !unknown) {
    throw ConfigurationError(fmt::format("data file '{}' cannot be opened: {}", path, std::strerror(ENOENT)));
  }
  return files;
}

/// Parses FILE or FILE:WEIGHT. A path that exists is a FILE; `notes` report if both exist.
DataSource parse_source(const std::string& text, std::vector<std::string>& notes) {
  DataSource source{text, {}, std::nullopt};
  const std::size_t colon = text.rfind(':');
  double weight = 0;
  if (colon != std::string::npos && colon > 0) {
    const char* const end = text.data() + text.size();
    const auto [at, error] = std::from_chars(text.data() + colon + 1, end, weight);
    const bool weighs = error == std::errc() && at == end, path = names_a_file(text);
    if (weighs && !path) source.weight = weight;
    if (weighs && path && names_a_file(text.substr(0, colon))) {
      // The text appends zeros to the weight, so that the result cannot be the name of the existing file.
      const bool whole = text.find('.', colon) == std::string::npos;
      notes.push_back(
          fmt::format("--data '{}' is taken as a path; the file '{}' with the weight {} is meant by '{}{}'",
                      text, text.substr(0, colon), weight, text, whole ? ".0" : "0"));
    }
  }
  if (!source.weight) {
    source.files = training::expand_pattern(text);
    return source;
  }
  const std::string path = text.substr(0, colon);
  source.files = with_reading([&] { return existing_files(path); },
                              fmt::format("--data '{}' was read as the file '{}' with the weight {}, as "
                                          "there is no file of the whole name either",
                                          text, path, text.substr(colon + 1)));
  return source;
}

std::vector<DataSource> data_sources(const Options& options, std::vector<std::string>& notes) {
  std::vector<DataSource> sources;
  for (const std::string& text : options.data_sources) sources.push_back(parse_source(text, notes));
  for (const DataSource& source : sources) {
    if (source.weight.has_value() != sources.front().weight.has_value()) {
      throw ConfigurationError(fmt::format("--data '{}' and --data '{}': give all of them a weight, or none",
                                           sources.front().text, source.text));
    }
  }
  return sources;
}

/// One --validation-data flag: the name of a set, if it has one, and its files.
struct HeldOut {
  std::string name;
  std::vector<std::string> files;
};

/// Parses NAME=FILE, or a path, which may contain an equals sign too: an existing path is a path. `notes`
/// report if both exist.
HeldOut parse_held_out(const std::string& text, std::vector<std::string>& notes) {
  const std::size_t equals = text.find('=');
  if (equals == std::string::npos) return {"", training::expand_pattern(text)};
  HeldOut set{text.substr(0, equals), {}};
  const std::string path = text.substr(equals + 1);
  const bool plain = !set.name.empty() && std::all_of(set.name.begin(), set.name.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.';
  });
  if (names_a_file(text)) {
    if (plain && names_a_file(path)) {
      notes.push_back(
          fmt::format("--validation-data '{}' is taken as a path; the set '{}' of '{}' is meant by '{}=./{}'",
                      text, set.name, path, set.name, path));
    }
    return {"", training::expand_pattern(text)};
  }
  if (!plain) {
    throw ConfigurationError(
        fmt::format("--validation-data '{0}': there is no file '{0}', and as NAME=FILE '{1}' is no name of a "
                    "set: letters, digits, "
                    "'-', '_' and '.'",
                    text, set.name));
  }
  set.files = with_reading(
      [&] { return existing_files(path); },
      fmt::format(
          "--validation-data '{0}' was read as the set '{1}' of '{2}', as no file matches '{0}' either", text,
          set.name, path));
  return set;
}

std::vector<HeldOut> held_out_sets(const Options& options, std::vector<std::string>& notes) {
  std::vector<HeldOut> sets;
  for (const std::string& text : options.validation_data) sets.push_back(parse_held_out(text, notes));
  for (std::size_t i = 1; i < sets.size(); ++i) {
    for (std::size_t k = 0; k < i; ++k) {
      if (sets[i].name.empty() || sets[k].name.empty()) {
        throw ConfigurationError(fmt::format(
            "--validation-data '{}' and --validation-data '{}': several sets need names, NAME=FILE each",
            options.validation_data[k], options.validation_data[i]));
      }
      if (sets[i].name == sets[k].name) {
        throw ConfigurationError(fmt::format("--validation-data names two sets '{}'", sets[i].name));
      }
    }
  }
  if (options.ngrams && sets.size() > 1) {
    throw ConfigurationError("--ngrams compares with one held-out text; give one --validation-data");
  }
  const bool known =
      std::any_of(sets.begin(), sets.end(), [&](const HeldOut& set) { return set.name == options.best_by; });
  if (!options.best_by.empty() && !known) {
    throw ConfigurationError(
        fmt::format("--best-by '{}' is no set that --validation-data names", options.best_by));
  }
  return sets;
}

/// The digest of a file, or of the digests of several.
std::string digest_of(const std::vector<std::unique_ptr<training::TokenFile>>& files) {
  if (files.empty()) return "";
  if (files.size() == 1) return files.front()->digest();
  std::string digests;
  for (const auto& file : files) digests += file->digest();
  return checkpoint::to_hex(checkpoint::digest_of(digests));
}

/// A line about files to train on whose contents are equal; empty if there are none.
std::string note_on_copies(const std::vector<std::unique_ptr<training::TokenFile>>& files) {
  std::map<std::string, std::string> paths;  // by digest
  std::string note;
  int copies = 0;
  for (const auto& file : files) {
    const auto [first, is_new] = paths.emplace(file->digest(), file->path());
    if (is_new) continue;
    if (copies++ == 0) {
      note = fmt::format(
          "'{}' has the contents of '{}', another file to train on: its windows are trained on once more in "
          "each epoch",
          file->path(), first->second);
    }
  }
  return copies > 1 ? fmt::format("{}; the same holds for {} more of the --data files", note, copies - 1)
                    : note;
}

/// Throws unless some target of the windows is learned; number(i) is the i-th of `count`.
template <typename Number>
void require_target(const training::Windows& windows, std::int64_t count, const Number& number,
                    std::string_view what, std::string_view remedy) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (training::has_target(windows, number(i))) return;
  }
  throw ConfigurationError(
      fmt::format("{}: {} of {} tokens {} looked at, and none of the tokens is learned; {}", what,
                  count == 1 ? "1 window" : fmt::format("{} windows", count), windows.sequence(),
                  count == 1 ? "was" : "were", remedy));
}

}  // namespace

Data open_data(const Options& options, const Settings& settings) {
  Data data;
  const std::vector<DataSource> sources = data_sources(options, data.notes);
  const bool without_training = options.command == Command::evaluate && !options.validation_data.empty();
  if (sources.empty() && options.ngrams)
    throw ConfigurationError("--ngrams counts the n-grams of --data; give it the text that was trained on");
  if (sources.empty() && !without_training)
    throw ConfigurationError("no data: give --data a text file or a file of tokens");
  const training::DataFormat format = training::parse_data_format(options.data_format);
  const auto open = [&](const std::string& path, auto& files) -> const training::TokenFile& {
    const training::TokenFile& file =
        *files.emplace_back(std::make_unique<training::TokenFile>(path, format));
    file.require_within(settings.model->shape().vocabulary, (std::int64_t{1} << 30) / file.width());
    return file;
  };
  const std::vector<HeldOut> held_out_by_name = held_out_sets(options, data.notes);
  const bool tails = held_out_by_name.empty();
  std::vector<training::TokenRange> training, ends_of_files;
  std::vector<std::size_t> ends;  // end of each source, among the files
  for (const DataSource& source : sources) {
    for (const std::string& path : source.files) {
      const training::TokenFile& file = open(path, data.training_files);
      const auto held_out =
          tails ? std::llround(static_cast<double>(file.size()) * options.validation_fraction) : 0;
      training.push_back({&file, 0, file.size() - held_out});
      if (tails) ends_of_files.push_back({&file, file.size() - held_out, held_out});
    }
    ends.push_back(training.size());
  }
  const std::string copies = note_on_copies(data.training_files);
  if (!copies.empty() && options.command == Command::train) data.notes.push_back(copies);
  data.training = std::make_unique<training::Windows>(std::move(training), settings.sequence, "training");
  const auto hold_out = [&](const std::string& name, std::vector<training::TokenRange> ranges) {
    ValidationSet& set = data.validation.emplace_back();
    set.name = name;
    const auto cut = [&] {
      return std::make_unique<training::Windows>(std::move(ranges), settings.sequence,
                                                 name.empty() ? "validation" : "validation on " + name);
    };
    set.windows =
        tails ? with_reading(cut, "--validation-data FILE holds out a file in place of the tail of each")
              : cut();
    set.numbers = training::evaluation_windows(set.windows->count(), held_out_windows(options, settings));
    const auto taken = static_cast<std::int64_t>(set.numbers.size());
    const std::int64_t all = set.windows->count();
    require_target(
        *set.windows, taken, [&](std::int64_t k) { return set.numbers[static_cast<std::size_t>(k)]; },
        fmt::format("the held-out windows{} hold nothing to evaluate",
                    name.empty() ? "" : " of '" + name + "'"),
        taken < all ? fmt::format("a larger --eval-batches takes more of the {} windows, --validation-data "
                                  "takes other windows",
                                  all)
                    : "hold out other data with --validation-data or --validation-fraction");
  };
  if (tails) hold_out("", std::move(ends_of_files));
  if (tails && options.command == Command::evaluate) {
    data.notes.push_back(
        fmt::format("the tail of --data is evaluated, {:.3g} % of it, as training holds it out; "
                    "--validation-data evaluates all of a file",
                    100 * options.validation_fraction));
  }
  for (const HeldOut& set : held_out_by_name) {
    std::vector<training::TokenRange> ranges;
    for (const std::string& path : set.files) {
      const training::TokenFile& file = open(path, data.validation_files);
      ranges.push_back({&file, 0, file.size()});
      const bool learned = std::any_of(data.training_files.begin(), data.training_files.end(),
                                       [&](const auto& other) { return other->digest() == file.digest(); });
      if (learned && options.command == Command::train) {
        data.notes.push_back(
            fmt::format("'{}' is held out, but has the contents of a file that is trained on: its losses are "
                        "of text that was learned",
                        path));
      }
    }
    hold_out(set.name, std::move(ranges));
  }
  require_one_kind(data.files());
  std::vector<training::Mixture::Source> mixed;
  if (!sources.empty() && sources.front().weight && sources.size() > 1) {
    for (std::size_t i = 0; i < sources.size(); ++i) {
      const std::int64_t begin = i == 0 ? 0 : data.training->first(ends[i - 1]);
      mixed.push_back({sources[i].text, data.training->first(ends[i]) - begin, *sources[i].weight});
    }
  } else if (!sources.empty()) {
    mixed.push_back({options.data, data.training->count(), sources.front().weight.value_or(1)});
  }
  std::int64_t first = 0;
  for (const training::Mixture::Source& source : mixed) {
    if (options.command != Command::train) break;
    require_target(
        *data.training, source.windows, [first](std::int64_t i) { return first + i; },
        fmt::format("--data '{}' holds nothing to learn", source.name),
        "tranche tokenize marks as learned texts, completions and what the assistant says");
    first += source.windows;
  }
  if (!mixed.empty())
    data.mixture = std::make_unique<training::Mixture>(std::move(mixed), settings.config.seed);
  if ((options.ngrams || options.sample_bytes > 0) &&
      (!data.text() || settings.model->shape().vocabulary < 256)) {
    const auto& files = data.training_files.empty() ? data.validation_files : data.training_files;
    const auto other = std::find_if(files.begin(), files.end(), [](const auto& file) {
      return file->format() != training::DataFormat::text;
    });
    const training::TokenFile& named = other != files.end() ? **other : *files.front();
    throw ConfigurationError(
        fmt::format("--ngrams and --sample-bytes are for text, of which every byte is a token; '{}' is read "
                    "as {}, and the model's vocabulary is {}",
                    named.path(), training::name_of(named.format()), settings.model->shape().vocabulary));
  }
  return data;
}

std::string note_on_long_documents(const Data& data, std::int64_t sequence) {
  std::int64_t documents = 0, longer = 0, longest = 0;
  for (const auto* files : {&data.training_files, &data.validation_files}) {
    for (const auto& file : *files) {
      std::int64_t begin = 0;
      for (const std::int64_t end : file->document_ends()) {
        ++documents;
        // The first token of a document is not a target, so a document may have one token more than a
        // sequence.
        if (end - begin > sequence + 1) ++longer;
        longest = std::max(longest, end - begin);
        begin = end;
      }
    }
  }
  if (longer == 0) return {};
  return fmt::format(
      "{} of {} documents {} longer than a sequence of {} tokens (the longest has {}): {} split over several",
      longer, documents, longer == 1 ? "is" : "are", sequence, longest, longer == 1 ? "it is" : "they are");
}

std::string note_on_cut_documents(const training::Windows& training) {
  const std::int64_t sequence = training.sequence();
  std::int64_t documents = 0, cut = 0;
  for (std::size_t r = 0; r < training.ranges().size(); ++r) {
    const training::TokenRange& range = training.ranges()[r];
    if (!range.file->has_targets()) continue;
    const std::span<const std::int64_t> ends = range.file->document_ends();
    const std::int64_t last = range.begin + (training.first(r + 1) - training.first(r)) * sequence;
    std::int64_t begin = range.begin;
    for (auto end = std::upper_bound(ends.begin(), ends.end(), begin); end != ends.end() && begin < last;
         ++end) {
      // A window has its last target from the next one, so a document may end with one token behind it.
      const std::int64_t next = begin + sequence - (begin - range.begin) % sequence;
      ++documents;
      if (next < std::min(*end - 1, last)) ++cut;
      begin = *end;
    }
  }
  if (cut == 0) return {};
  return fmt::format(
      "{} of {} documents ({:.2g} %) {} cut by the end of a window of {} tokens: what follows the cut is "
      "learned without "
      "what stands before it, such as the prompt; a longer --sequence cuts fewer",
      cut, documents, 100.0 * static_cast<double>(cut) / static_cast<double>(documents),
      cut == 1 ? "is" : "are", sequence);
}

RunIdentity identity_of(const Options& options, const Settings& settings, const Data& data) {
  Tokenizer tokenizer;
  if (!data.bytes()) tokenizer = {Tokenizer::Kind::tokens, settings.model->shape().vocabulary};
  return {settings.model,
          settings.sequence,
          tokenizer,
          options.data,
          data.training->count(),
          data.held_out_windows(),
          digest_of(data.training_files),
          digest_of(data.validation_files)};
}

std::uint64_t ValidationSet::digest() const {
  std::string text = std::to_string(windows->sequence());
  for (const training::TokenRange& range : windows->ranges())
    text += fmt::format(" {} {} {}", range.file->digest(), range.begin, range.size);
  for (const std::int64_t number : numbers) text += fmt::format(" {}", number);
  return checkpoint::digest_of(text);
}

}  // namespace tranche::tools
