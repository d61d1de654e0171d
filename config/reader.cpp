// Checks a document against the table of keys.

#include "config/reader.h"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <nlohmann/json.hpp>

#include "config/keys.h"
#include "core/json.h"
#include "core/printable.h"

namespace tranche::detail {
namespace {

/// Floats up to here hold every integer exactly.
constexpr double exact_integers = 9007199254740992.0;

std::string shown(const Json& value) {
  std::string text = value.dump();
  if (text.size() > 60) text = std::string(whole_characters(text, 57)) + "...";
  return text;
}

std::string found(const Json& value) {
  if (value.is_string()) return fmt::format("the text {}", shown(value));
  if (value.is_array()) return fmt::format("the list {}", shown(value));
  if (value.is_object()) return fmt::format("the block {}", shown(value));
  return shown(value);
}

template <typename Predicate>
bool is_list_of(const Json& value, Predicate fits) {
  if (!value.is_array()) return false;
  for (const Json& entry : value) {
    if (!fits(entry)) return false;
  }
  return true;
}

bool has_kind(const Json& value, ValueKind kind) {
  switch (kind) {
    case ValueKind::boolean:
      return value.is_boolean();
    case ValueKind::integer:
      return json_integer(value).has_value();
    case ValueKind::number:
      return value.is_number();
    case ValueKind::text:
      return value.is_string();
    case ValueKind::size:
      return json_integer(value) || (value.is_string() && size_from(value.get<std::string>()).has_value());
    case ValueKind::numbers:
      return is_list_of(value, [](const Json& entry) { return entry.is_number(); });
    case ValueKind::texts:
      return is_list_of(value, [](const Json& entry) { return entry.is_string(); });
    case ValueKind::block:
      return value.is_object();
    case ValueKind::any:
      return true;
  }
  return false;
}

bool is_automatic(const Json& value) {
  return value.is_string() && value.get<std::string>() == "auto";
}

/// True for values with which a refused key requests nothing.
bool asks_for_nothing(const Json& value, const ConfigKey& key) {
  const Json harmless = parse_json(key.default_value);
  if (value.is_null() || value == harmless) return true;
  if (harmless == Json(true)) return false;
  if (value == Json(false) || value == Json("none")) return true;
  if (!value.is_object() || value.empty()) return value.is_object();
  const auto enabled = value.find("enabled");
  // Hugging Face's trainer would replace "auto" by an argument; here there is none.
  return enabled != value.end() && (*enabled == Json(false) || is_automatic(*enabled));
}

/// True for the schedules of DeepSpeed, whose warm-up has warmup_num_steps; others have num_warmup_steps.
bool is_warmup(const Json& type) {
  return type.is_string() && lower(type.get<std::string>()).starts_with("warmup");
}

class Walker {
 public:
  Walker(const Json& document, bool strict, const std::vector<std::string>& overrides, Problems& problems,
         std::vector<IgnoredKey>& ignored)
      : document_(document), strict_(strict), overrides_(overrides), problems_(problems), ignored_(ignored) {}

  void walk(const Json& block, const std::string& path) {
    if (path == "scheduler" && block.contains("type")) warms_up_ = is_warmup(block["type"]);
    for (const auto& [name, value] : block.items()) {
      const std::string key_path = path.empty() ? name : path + "." + name;
      const ConfigKey* key = find_configuration_key(key_path);
      if (key == nullptr) {
        if (!path.empty() || !other_file(block, name, value)) unknown(path, name, key_path);
        continue;
      }
      // Parameters of an unknown type are not checked: the type's name is the problem.
      if (name == "params" && block.contains("type") && !is_known_type(path, block["type"])) continue;
      switch (key->key_class) {
        case KeyClass::honoured:
          honoured(*key, value);
          break;
        case KeyClass::no_meaning:
          ignored_.push_back({std::string(key->path), std::string(key->text)});
          known_names_only(value, key_path);
          break;
        case KeyClass::refused:
          if (!asks_for_nothing(value, *key)) {
            problems_.add(fmt::format("{}: {} cannot be honoured: {}", key->path, shown(value), key->text));
          } else if (value == Json(true)) {
            ignored_.push_back({std::string(key->path), std::string(key->text)});
          }
          break;
      }
    }
  }
  Values take() { return std::move(values_); }

 private:
  void honoured(const ConfigKey& key, const Json& value) {
    if (value.is_null()) return;
    if (key.automatic && is_automatic(value)) return values_.put_automatic(std::string(key.path));
    if (!has_kind(value, key.kind)) {
      problems_.add(fmt::format("{}: expected {}{}, found {}", key.path, name_of(key.kind),
                                key.automatic ? " or \"auto\"" : "", found(value)));
      return;
    }
    if (key.kind == ValueKind::block) {
      walk(value, std::string(key.path));
    } else {
      if (key.path == "tranche.parameter_groups") rules(value);
      values_.put(std::string(key.path), value);
    }
  }

  /// Checks the entries of tranche.parameter_groups, the only list of blocks.
  void rules(const Json& list) {
    if (!list.is_array()) {
      problems_.add(
          fmt::format("tranche.parameter_groups: expected a list of blocks, found {}", found(list)));
      return;
    }
    for (std::size_t i = 0; i < list.size(); ++i) {
      const std::string where = fmt::format("tranche.parameter_groups[{}]", i);
      if (!list[i].is_object()) {
        problems_.add(fmt::format("{}: expected a block {{...}}, found {}", where, found(list[i])));
        continue;
      }
      for (const auto& [name, value] : list[i].items()) {
        const ConfigKey* key = find_configuration_key("tranche.parameter_groups[]." + name);
        if (key == nullptr) {
          unknown("tranche.parameter_groups[]", name, where + "." + name);
        } else if (!value.is_null() && !has_kind(value, key->kind)) {
          problems_.add(
              fmt::format("{}.{}: expected {}, found {}", where, name, name_of(key->kind), found(value)));
        }
      }
      if (!list[i].contains("pattern")) problems_.add(where + ": the key 'pattern' is missing");
    }
  }

  /// A block that has no meaning is still checked for mistyped names, if its keys are listed.
  void known_names_only(const Json& value, const std::string& path) {
    if (!value.is_object() || keys_within(path).empty()) return;
    for (const auto& [name, inner] : value.items()) {
      const std::string key_path = path + "." + name;
      if (find_configuration_key(key_path) == nullptr) {
        unknown(path, name, key_path);
      } else {
        known_names_only(inner, key_path);
      }
    }
  }

  /// Refuses an unknown key at the top level that tells that another file was meant, and returns true if so.
  bool other_file(const Json& document, const std::string& name, const Json& value) {
    if (name == "model_type" || (name == "architectures" && !document.contains("model_type"))) {
      problems_.add(fmt::format("'{}' is a key of a model's config.json, which --model takes", name));
      return true;
    }
    if (name == "peft_type") {
      problems_.add(
          "'peft_type' is a key of PEFT's adapter_config.json: keys like tranche.lora.rank ask for adapters, "
          "and tranche checkpoint import reads PEFT's folder");
      return true;
    }
    if (name == "per_device_train_batch_size" ||
        (name == "output_dir" && !document.contains("per_device_train_batch_size"))) {
      problems_.add(fmt::format(
          "'{}' is a key of transformers' TrainingArguments, which are no configuration: write their numbers "
          "as train_micro_batch_size_per_gpu, gradient_accumulation_steps, optimizer.params.lr and "
          "scheduler; --checkpoint-dir names the folder",
          name));
      return true;
    }
    if (!value.is_object()) return false;
    for (const auto& [inner, ignored] : value.items()) {
      if (find_configuration_key(inner) == nullptr) continue;
      problems_.add(fmt::format(
          "'{}' is no key, but its block holds '{}', which is one: the keys stand at the top level "
          "of the file; make a file of that block",
          name, inner));
      return true;
    }
    return false;
  }

  /// True if the file, or an override, gives the key of this path.
  bool given(std::string path) const {
    std::replace(path.begin(), path.end(), '.', '/');
    return document_.contains(Json::json_pointer("/" + path));
  }

  /// True if --set or a flag gives this key of the top level, or a key within it.
  bool overridden(std::string_view name) const {
    return std::any_of(overrides_.begin(), overrides_.end(), [&](const std::string& text) {
      return text.substr(0, text.find_first_of(".=")) == name;
    });
  }

  void unknown(const std::string& block, const std::string& name, const std::string& path) {
    std::string suggestion = suggest_key(block, name);
    if (warms_up_ && path == "scheduler.params.warmup_steps")
      suggestion = "scheduler.params.warmup_num_steps";
    std::string_view beside;
    if (block.empty() && !strict_) {
      const std::string meant = mistyped_key(name);
      // A file may hold another program's keys. One that means a key of ours is refused unless that is given.
      const std::string ours = other_name_of_key(block, name);
      if (meant.empty() && !overridden(name) && (ours.empty() || given(ours))) {
        ignored_.push_back({path, ours.empty() ? "" : fmt::format("there is '{}'", ours), true});
        return;
      }
      if (!meant.empty()) {
        suggestion = meant;
      } else if (!ours.empty() && !overridden(name)) {
        beside = " Where that is given too, this one is ignored";
      }
    }
    problems_.add(fmt::format("unknown key '{}'{}{}", path,
                              suggestion.empty() ? "" : fmt::format("; did you mean '{}'?", suggestion),
                              beside));
  }

  const Json& document_;
  bool strict_;
  const std::vector<std::string>& overrides_;
  bool warms_up_ = false;  ///< the schedule is one of is_warmup()
  Problems& problems_;
  std::vector<IgnoredKey>& ignored_;
  Values values_;
};

}  // namespace

struct Values::Store {
  std::map<std::string, Json, std::less<>> entries;
  std::vector<std::string> automatic;  ///< in the order of the file
};
Values::Values() : store_(std::make_unique<Store>()) {}
Values::~Values() = default;
Values::Values(Values&&) noexcept = default;
Values& Values::operator=(Values&&) noexcept = default;

void Values::put(std::string path, const Json& value) {
  store_->entries.insert_or_assign(std::move(path), value);
}
void Values::put_automatic(std::string path) {
  store_->automatic.push_back(std::move(path));
}
bool Values::is_automatic(std::string_view path) const {
  return std::find(store_->automatic.begin(), store_->automatic.end(), path) != store_->automatic.end();
}
std::vector<std::string> Values::automatic_paths() const {
  return store_->automatic;
}
std::vector<std::string> Values::paths() const {
  std::vector<std::string> paths;
  for (const auto& [path, value] : store_->entries) paths.push_back(path);
  return paths;
}
const Json* Values::json(std::string_view path) const {
  const auto entry = store_->entries.find(path);
  return entry == store_->entries.end() ? nullptr : &entry->second;
}
bool Values::has(std::string_view path) const {
  return json(path) != nullptr;
}
std::optional<std::int64_t> Values::integer(std::string_view path) const {
  const Json* value = json(path);
  return value == nullptr ? std::nullopt : json_integer(*value);
}
std::optional<double> Values::number(std::string_view path) const {
  const Json* value = json(path);
  return value == nullptr ? std::nullopt : std::optional(value->get<double>());
}
std::optional<bool> Values::boolean(std::string_view path) const {
  const Json* value = json(path);
  return value == nullptr ? std::nullopt : std::optional(value->get<bool>());
}
std::optional<std::string> Values::text(std::string_view path) const {
  const Json* value = json(path);
  return value == nullptr ? std::nullopt : std::optional(value->get<std::string>());
}
std::optional<std::int64_t> Values::size(std::string_view path) const {
  const Json* value = json(path);
  if (value == nullptr) return std::nullopt;
  return value->is_string() ? size_from(value->get<std::string>()) : integer(path);
}
std::vector<double> Values::numbers(std::string_view path) const {
  const Json* value = json(path);
  return value == nullptr ? std::vector<double>{} : value->get<std::vector<double>>();
}
std::vector<std::string> Values::texts(std::string_view path) const {
  const Json* value = json(path);
  return value == nullptr ? std::vector<std::string>{} : value->get<std::vector<std::string>>();
}
std::vector<std::string> Values::names_within(std::string_view block) const {
  const std::string prefix = std::string(block) + ".";
  std::vector<std::string> names;
  for (const auto& [path, value] : store_->entries) {
    if (path.starts_with(prefix)) names.push_back(path.substr(prefix.size()));
  }
  return names;
}

Values check_keys(const Json& document, bool strict, Problems& problems, std::vector<IgnoredKey>& ignored,
                  const std::vector<std::string>& overrides) {
  Walker walker(document, strict, overrides, problems, ignored);
  walker.walk(document, "");
  return walker.take();
}

std::optional<DataType> data_type_from(std::string_view text) {
  if (text == "fp32" || text == "float32" || text == "float") return DataType::float32;
  if (text == "bf16" || text == "bfloat16") return DataType::bfloat16;
  if (text == "fp16" || text == "float16" || text == "half") return DataType::float16;
  return std::nullopt;
}

std::optional<std::int64_t> size_from(std::string_view text) {
  const std::string copy(text);
  if (copy.empty() || (std::isdigit(static_cast<unsigned char>(copy.front())) == 0 && copy.front() != '.')) {
    return std::nullopt;
  }
  if (copy.find_first_of("xX") != std::string::npos) return std::nullopt;  // stod reads hexadecimal
  std::size_t used = 0;
  double number = 0;
  try {
    number = std::stod(copy, &used);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  while (used < copy.size() && copy[used] == ' ') ++used;
  std::string unit = copy.substr(used);  // in any case of letters: nobody means millibytes
  for (char& c : unit) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  static constexpr std::pair<std::string_view, double> units[] = {
      {"", 1},         {"b", 1},      {"kib", 0x1p10}, {"mib", 0x1p20}, {"gib", 0x1p30},
      {"tib", 0x1p40}, {"k", 0x1p10}, {"m", 0x1p20},   {"g", 0x1p30},   {"t", 0x1p40},
      {"kb", 1e3},     {"mb", 1e6},   {"gb", 1e9},     {"tb", 1e12}};
  for (const auto& [name, factor] : units) {
    if (unit != name) continue;
    const double bytes = number * factor;
    // A part of a byte is a number whose unit was left out; as 0 it would mean that there is no limit.
    if (!(bytes == 0 || bytes >= 1) || bytes > exact_integers) return std::nullopt;
    return static_cast<std::int64_t>(bytes);
  }
  return std::nullopt;
}

}  // namespace tranche::detail
