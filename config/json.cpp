// Reads and writes JSON text: strict parsing, overrides, and the effective configuration.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "config/keys.h"
#include "config/reader.h"
#include "core/json.h"
#include "core/relaxed_json.h"
#include "tranche/core/error.h"

namespace tranche {
namespace detail {

void Problems::raise(const std::string& origin) const {
  if (lines_.empty()) return;
  if (lines_.size() == 1) throw ConfigurationError(origin + ": " + lines_.front());
  std::string text = fmt::format("{} has {} problems:", origin, lines_.size());
  for (const std::string& line : lines_) text += "\n  " + line;
  throw ConfigurationError(text);
}

namespace {

std::string underflow(const std::string& number) {
  return fmt::format("number underflow parsing '{}'; write 0 if that is meant", number);
}

}  // namespace

Json read_json(std::string_view text, const std::string& origin) {
  if (text.starts_with("\xff\xfe") || text.starts_with("\xfe\xff"))
    throw ConfigurationError(fmt::format("{} is UTF-16 text; save it as UTF-8", origin));
  StrictJson strict;
  try {
    strict = strict_json(text);
  } catch (const InvalidArgument& error) {
    throw ConfigurationError(fmt::format("{} is not JSON: {}", origin, error.message()));
  }
  JsonRemarks remarks;
  Json document = parse_json(strict.text, &remarks);
  if (document.is_discarded()) {
    const std::size_t at = std::min(remarks.byte, strict.text.size());
    throw ConfigurationError(
        fmt::format("{} is not JSON: {}: {}", origin, place_in(text, strict.origin[at]), remarks.problem));
  }
  if (!remarks.duplicate.empty()) {
    throw ConfigurationError(fmt::format("{}: key '{}' is given twice; keep one", origin, remarks.duplicate));
  }
  if (!remarks.vanished.empty()) {
    const std::size_t at = std::min(strict.text.find(remarks.vanished), strict.text.size());
    throw ConfigurationError(fmt::format("{} is not JSON: {}: {}", origin, place_in(text, strict.origin[at]),
                                         underflow(remarks.vanished)));
  }
  if (!document.is_object()) {
    throw ConfigurationError(
        fmt::format("{} holds {} instead of a block {{...}} of keys", origin, document.type_name()));
  }
  return document;
}

void expand_zero_optimization(Json& document, std::vector<std::string>& notes) {
  const auto block = document.find("zero_optimization");
  if (block == document.end() || !block->is_boolean()) return;
  const bool on = block->get<bool>();
  notes.push_back(fmt::format("zero_optimization: {} is taken as stage {}", on, on ? 1 : 0));
  *block = Json{{"stage", on ? 1 : 0}};
}

namespace {

/// Moves `value` to `place`. Both may be blocks, with different keys. `path` is the path of `place`.
void merge(Json& place, Json&& value, const std::string& path, Problems& problems) {
  if (place.is_null()) {
    place = std::move(value);
  } else if (place.is_object() && value.is_object()) {
    for (auto& [name, inner] : value.items())
      merge(place[name], std::move(inner), path + "." + name, problems);
  } else if (!value.is_null()) {
    problems.add(fmt::format("{}: given twice, with dots in its name and in its block; keep one", path));
  }
}

}  // namespace

void expand_dots(Json& block, const std::string& path, Problems& problems) {
  if (!block.is_object()) return;
  std::vector<std::string> dotted;
  for (auto& [name, value] : block.items()) {
    const std::string key_path = path.empty() ? name : path + "." + name;
    if (find_configuration_key(key_path) == nullptr) continue;
    expand_dots(value, key_path, problems);
    if (name.find('.') != std::string::npos) dotted.push_back(name);
  }
  for (const std::string& name : dotted) {
    Json value = std::move(block[name]);
    block.erase(name);
    Json* place = &block;
    std::string reached = path;
    for (std::size_t begin = 0; begin <= name.size() && (place->is_object() || place->is_null());) {
      const std::size_t end = std::min(name.find('.', begin), name.size());
      const std::string part = name.substr(begin, end - begin);
      reached += (reached.empty() ? "" : ".") + part;
      place = &(*place)[part];
      begin = end + 1;
    }
    merge(*place, std::move(value), reached, problems);
  }
}

namespace {

/// Adds a line for each override that a later one of the same key, or of an enclosing block, replaces.
void note_replaced(const std::vector<std::string>& overrides, std::vector<std::string>& notes) {
  const auto path_of = [](const std::string& text) { return text.substr(0, text.find('=')); };
  for (std::size_t i = 0; i < overrides.size(); ++i) {
    for (std::size_t k = i + 1; k < overrides.size(); ++k) {
      const std::string earlier = path_of(overrides[i]), later = path_of(overrides[k]);
      if (overrides[i] == overrides[k] || (earlier != later && !earlier.starts_with(later + "."))) continue;
      notes.push_back(
          fmt::format("{} is replaced by {}, which was given behind it", overrides[i], overrides[k]));
      break;
    }
  }
}

/// Adds to `removed` the paths of the keys that `file` gives in the block `now`, and `value`, which replaces
/// it, does not.
void list_removed(const std::string& path, const Json& now, const Json& value, const Json& file,
                  std::vector<std::string>& removed) {
  if (now.is_object() && file.is_object()) {
    for (const auto& [name, inner] : now.items()) {
      const auto in_file = file.find(name);
      if (in_file == file.end()) continue;
      const bool kept = value.is_object() && value.contains(name);
      list_removed(path + "." + name, inner, kept ? value[name] : Json(), *in_file, removed);
    }
  } else if (value.is_null() && !now.is_null()) {
    removed.push_back(path);
  }
}

/// Adds a line if the override `text`, which replaces `now` by `value`, removes keys of the block in `file`
/// that it does not name.
void note_removed(const std::string& text, const std::string& path, const Json& now, const Json& value,
                  const Json& file, std::vector<std::string>& notes) {
  constexpr std::size_t most_names = 8;
  std::vector<std::string> removed;
  if (now.is_object() && !value.is_null()) list_removed(path, now, value, file, removed);
  if (removed.empty()) return;
  const std::size_t shown = std::min(removed.size(), most_names);
  notes.push_back(
      fmt::format("{} replaces the whole block, and so removes {}{} of the configuration", text,
                  fmt::join(removed.begin(), removed.begin() + static_cast<std::ptrdiff_t>(shown), ", "),
                  shown < removed.size() ? fmt::format(" and {} more keys", removed.size() - shown) : ""));
}

}  // namespace

void apply_overrides(Json& document, const std::vector<std::string>& overrides, Problems& problems,
                     std::vector<std::string>& notes) {
  note_replaced(overrides, notes);
  const Json file = document, absent;
  for (const std::string& text : overrides) {
    const std::size_t equals = text.find('=');
    if (equals == std::string::npos || equals == 0) {
      problems.add(fmt::format("override '{}' is not of the form key.path=value", text));
      continue;
    }
    const std::string path = text.substr(0, equals);
    const std::string written = text.substr(equals + 1);
    if (!is_utf8(text)) {
      problems.add(fmt::format("override '{}' is not UTF-8, as a configuration is", text));
      continue;
    }
    JsonRemarks remarks;
    Json value = parse_json(written, &remarks);
    if (value.is_discarded()) value = written;
    if (!remarks.duplicate.empty()) {
      problems.add(fmt::format("override '{}': key '{}' is given twice; keep one", text, remarks.duplicate));
      continue;
    }
    if (!remarks.vanished.empty()) {
      problems.add(fmt::format("override '{}': {}", text, underflow(remarks.vanished)));
      continue;
    }
    expand_dots(value, path, problems);
    Json* place = &document;
    const Json* in_file = &file;
    std::size_t begin = 0;
    bool fits = static_cast<std::size_t>(std::count(path.begin(), path.end(), '.')) < deepest_json;
    while (fits) {
      const std::size_t dot = path.find('.', begin);
      const std::string name = path.substr(begin, dot == std::string::npos ? dot : dot - begin);
      fits = !name.empty() && (place->is_object() || place->is_null());
      if (!fits) break;
      place = &(*place)[name];
      in_file = in_file->is_object() && in_file->contains(name) ? &(*in_file)[name] : &absent;
      if (dot == std::string::npos) break;
      begin = dot + 1;
    }
    if (fits) {
      note_removed(text, path, *place, value, *in_file, notes);
      *place = std::move(value);
    } else {
      problems.add(fmt::format("override '{}': '{}' is not a path of blocks and a key", text, path));
    }
  }
}

Json optimizer_parameters_json(const Config& config) {
  const OptimizerConfig& optimizer = config.optimizer;
  Json json{{"lr", optimizer.learning_rate}};
  const RuleType* const type = find_rule(optimizer.type);
  if (type == nullptr) return json;
  for (const RuleOption& option : type->rule->options) {
    const auto given = optimizer.parameters.find(option.name);
    const bool is_given = given != optimizer.parameters.end();
    const double first = is_given ? given->second.first : option.first;
    const double second = is_given ? given->second.second : option.second;
    Json& value = json[std::string(option.name)];
    if (option.kind == RuleOption::Kind::flag) {
      value = first != 0;
    } else if (option.kind == RuleOption::Kind::pair) {
      value = {first, second};
    } else if (option.kind == RuleOption::Kind::choice) {
      value = option.choices[static_cast<std::size_t>(first)];
    } else if (std::isfinite(first)) {
      value = first;
    }
  }
  return json;
}

Json schedule_parameters_json(const Config& config) {
  // Keys are sorted, because reading sorts them too.
  return nlohmann::json(read_json(config.schedule.parameters_json, "the schedule's parameters"));
}

Json groups_json(const Config& config) {
  Json json = Json::array();
  for (const ParameterGroupRule& rule : config.group_rules) {
    Json entry;
    entry["pattern"] = rule.pattern;
    each_value(rule, [&](const char* name, const auto& value) {
      if (value) entry[name] = *value;
    });
    json.push_back(std::move(entry));
  }
  return json;
}

Json cuts_json(const Config& config) {
  if (config.pipeline_cuts == PipelineCuts::listed) return config.pipeline_begins;
  return name_of(config.pipeline_cuts);
}

Json layout_json(const Config& config) {
  return config.layout;
}

}  // namespace detail

EarlierDefaults earlier_defaults(const Config& config, std::string_view saved) {
  const detail::Json json = detail::parse_json(saved);
  const auto was = [&](const char* path, const detail::Json& value) {
    const detail::Json::json_pointer place(path);
    return json.is_object() && json.contains(place) && json[place] == value;
  };
  return {!config.precision_given && was("/bf16/enabled", true),
          !config.clipping_given && was("/gradient_clipping", 1.0)};
}

std::string Config::batch_text(int ranks) const {
  if (!world_size_invariant) {
    return fmt::format("{} = {} per micro-batch x {} accumulated x {} ranks", train_batch_size,
                       micro_batch_size, accumulation_steps, ranks);
  }
  const int last = ranks_with_samples(accumulation_steps - 1, ranks);
  return fmt::format("{} = {} per micro-batch x {}, for any number of ranks; {} on {} rank{}{}",
                     train_batch_size, micro_batch_size, train_batch_size / micro_batch_size,
                     accumulation_steps == 1 ? "1 round" : fmt::format("{} rounds", accumulation_steps),
                     ranks, ranks == 1 ? "" : "s",
                     last == ranks ? "" : fmt::format(", the last on {}", last));
}

std::string Config::communication_text() const {
  const std::string gradients =
      quantized_gradients ? "int8 blocks" : std::string(name_of(precision.communication));
  return gradients + (quantized_weights ? ", weights in training int8 blocks" : "");
}

std::string Config::dtypes_text() const {
  return fmt::format("compute {}, communication {}, accumulation {}, master {}{}, moments {}",
                     name_of(precision.compute), communication_text(), name_of(precision.accumulation),
                     name_of(precision.master), precision.stochastic_rounding ? " (stochastic rounding)" : "",
                     name_of(precision.moments));
}

std::string Config::to_json() const {
  detail::Json json;
  for (const detail::ConfigKey& key : detail::configuration_keys()) detail::write_field(key, *this, json);
  return json.dump(2);
}

}  // namespace tranche
