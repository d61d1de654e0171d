#pragma once
/// Private to config/: reads JSON text into the values that the table of keys allows.

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/config/config.h"

namespace tranche::detail {

/// Keeps the order of the file, so that problems are reported in that order.
using Json = nlohmann::ordered_json;

/// The problems of a configuration, one line each, which are reported in one error.
class Problems {
 public:
  void add(std::string line) { lines_.push_back(std::move(line)); }
  /// Adds a line before all lines of add(), for a problem that makes the others irrelevant.
  void add_first(std::string line) {
    lines_.insert(lines_.begin() + static_cast<std::ptrdiff_t>(first_++), std::move(line));
  }
  bool empty() const noexcept { return lines_.empty(); }
  const std::vector<std::string>& lines() const noexcept { return lines_; }
  /// Throws ConfigurationError with every line, preceded by `origin`, if there are any.
  void raise(const std::string& origin) const;

 private:
  std::vector<std::string> lines_;
  std::size_t first_ = 0;
};

/// Parses JSON in the relaxed form of core/relaxed_json.h. Throws ConfigurationError with line and column, or
/// with the path of a duplicate key.
Json read_json(std::string_view text, const std::string& origin);

/// Replaces the older form of zero_optimization, a boolean, by a block: false means stage 0, true stage 1.
void expand_zero_optimization(Json& document, std::vector<std::string>& notes);

/// Moves the values of keys with dots in their names ("optimizer.params.lr") into their blocks. `path` is the
/// path of `block`, empty for a document.
void expand_dots(Json& block, const std::string& path, Problems& problems);

/// Applies "key.path=value" texts to the document; a value is JSON, or else text. `notes` gets a line for
/// each one that a later one replaces, and for one that removes keys of the document.
void apply_overrides(Json& document, const std::vector<std::string>& overrides, Problems& problems,
                     std::vector<std::string>& notes);

/// The honoured keys of a document, by path, without those that have their default ("auto", null).
class Values {
 public:
  Values();
  ~Values();
  Values(Values&&) noexcept;
  Values& operator=(Values&&) noexcept;

  bool has(std::string_view path) const;
  /// The value after the check against the table; nullopt when the key is absent.
  std::optional<std::int64_t> integer(std::string_view path) const;
  std::optional<double> number(std::string_view path) const;
  std::optional<bool> boolean(std::string_view path) const;
  std::optional<std::string> text(std::string_view path) const;
  std::optional<std::int64_t> size(std::string_view path) const;
  std::vector<double> numbers(std::string_view path) const;
  std::vector<std::string> texts(std::string_view path) const;
  /// nullptr when the key is absent.
  const Json* json(std::string_view path) const;
  /// True when the key is given as "auto".
  bool is_automatic(std::string_view path) const;
  std::vector<std::string> automatic_paths() const;
  /// Paths of all keys that are given, except as "auto", in ascending order.
  std::vector<std::string> paths() const;
  /// The last names of the keys that are given within a block.
  std::vector<std::string> names_within(std::string_view block) const;

  void put(std::string path, const Json& value);
  void put_automatic(std::string path);

 private:
  struct Store;
  std::unique_ptr<Store> store_;
};

/// Checks a document against the table. Unknown keys, refused ones and wrong types are added to `problems`,
/// keys without a meaning to `ignored`; the other values are returned. Unknown keys of the top level that do
/// not resemble a known one, or whose meaning a known one of the document has, are added to `ignored` too,
/// unless `strict` or an override gives them.
Values check_keys(const Json& document, bool strict, Problems& problems, std::vector<IgnoredKey>& ignored,
                  const std::vector<std::string>& overrides = {});

/// A configuration whose problems have not been thrown yet.
struct Reading {
  Values values;
  Problems problems;
  Config config;  ///< complete when there are no problems
  int ranks = 1;
};
/// Reads JSON text. Without `ranks`, the number of ranks follows from the three batch figures, else it is 1.
Reading read_config_text(std::string_view text, std::optional<int> ranks,
                         const std::vector<std::string>& overrides, bool strict, const std::string& origin);
/// The value that replaced "auto", as JSON.
std::string value_of_automatic(const std::string& path, const Config& config);

/// The types that make_optimizer() accepts.
const std::vector<std::string>& optimizer_types();
/// The keys of optimizer.params for one of these types; AdamW's for any other name.
std::vector<std::string> optimizer_parameters(std::string_view type);
/// True when `type` names a known optimizer (block "optimizer") or schedule (block "scheduler").
bool is_known_type(std::string_view block, const Json& type);

/// The text in lower case.
std::string lower(std::string text);
/// The value of a key for an int field. If it does not fit, adds a problem and returns `otherwise`.
int small_integer(const Values& values, std::string_view path, int otherwise, Problems& problems);

// Readers and writers of keys that set several fields, or that have several forms.

void read_compute(const Values& values, Config& config, Problems& problems);     ///< bf16, fp16
void read_loss_scale(const Values& values, Config& config, Problems& problems);  ///< fixed or dynamic
void read_optimizer(const Values& values, Config& config, Problems& problems);
void read_schedule(const Values& values, Config& config, Problems& problems);
void read_groups(const Values& values, Config& config, Problems& problems);
void read_cuts(const Values& values, Config& config, Problems& problems);
void read_layout(const Values& values, Config& config, Problems& problems);
Json optimizer_parameters_json(const Config& config);
Json schedule_parameters_json(const Config& config);
Json groups_json(const Config& config);
Json cuts_json(const Config& config);
Json layout_json(const Config& config);

/// Calls `each` with the name and the field of each key of tranche.parameter_groups[] except its pattern.
template <typename Rule, typename Each>
void each_value(Rule& rule, const Each& each) {
  each("learning_rate_factor", rule.learning_rate_factor);
  each("decay", rule.decay);
  each("learning_rate", rule.learning_rate);
  each("weight_decay", rule.weight_decay);
  each("betas", rule.betas);
  each("eps", rule.epsilon);
}

/// Fills the fields from values: parse_config() without the checks across fields.
Config config_from(const Values& values, Problems& problems);
/// Checks fields against each other, for a Config from any source; completes the batch.
void check_fields(Config& config, int ranks, Problems& problems);
/// Adds a line to Config::notes for each difference between this file's meaning here and in DeepSpeed, and
/// one with the values of "auto". For a complete Config.
void note_differences(const Values& values, Config& config);
/// Adds a line to Config::notes for each key without effect beside the others that an override gives, and one
/// for all of those that the document gives outside of blocks with a key `enabled`.
void note_idle_keys(const Values& values, const std::vector<std::string>& overrides, int ranks,
                    Config& config);
/// True if an override gives this key, a key within it, or its block.
bool is_overridden(std::string_view path, const std::vector<std::string>& overrides);
/// schedule_notes(), with `whole` ("run") as what has so many steps.
std::vector<std::string> notes_on_schedule(const Config& config, std::int64_t steps, std::string_view whole);
/// Combines the keys of offloaded state, and checks them against each other.
void read_offload(const Values& values, Config& config, Problems& problems);
void check_offload(Config& config, Problems& problems);
/// The schedule's type in its own spelling. For an unknown one, adds a problem and returns "constant".
std::string schedule_type(const std::string& text, Problems& problems);
/// Checks that the schedule's type is known, that its parameters can be read and that it can be built;
/// problems name their keys. Gives the type its own spelling.
void check_schedule(Config& config, Problems& problems);
/// Parses "fp32" and its other spellings; nullopt for anything else.
std::optional<DataType> data_type_from(std::string_view text);
/// Parses a number of bytes; nullopt when the text is invalid.
std::optional<std::int64_t> size_from(std::string_view text);

}  // namespace tranche::detail
