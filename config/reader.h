#pragma once
/// Inside of the configuration's reading: JSON text to values that the table of keys allows. Not for users.

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/config/config.h"

namespace tranche::detail {

/// Keeps the order of the file, so that problems are told in it.
using Json = nlohmann::ordered_json;

/// The problems of a configuration, one line each, all reported in one error.
class Problems {
 public:
  void add(std::string line) { lines_.push_back(std::move(line)); }
  /// In front of all that were not added so: what makes the others beside the point.
  void add_first(std::string line) {
    lines_.insert(lines_.begin() + static_cast<std::ptrdiff_t>(first_++), std::move(line));
  }
  bool empty() const noexcept { return lines_.empty(); }
  const std::vector<std::string>& lines() const noexcept { return lines_; }
  /// Throws ConfigurationError with every line, `origin` in front, unless there are none.
  void raise(const std::string& origin) const;

 private:
  std::vector<std::string> lines_;
  std::size_t first_ = 0;
};

/// Parses JSON as people write it (core/relaxed_json.h). Throws ConfigurationError with line and column, or
/// the path of a key that is there twice.
Json read_json(std::string_view text, const std::string& origin);

/// The older form of zero_optimization, a boolean, becomes the block that it stands for: false is stage 0,
/// true stage 1.
void expand_zero_optimization(Json& document, std::vector<std::string>& notes);

/// Puts "key.path=value" texts into the document; a value is JSON, or else text. `notes` gets a line for each
/// one that a later one replaces.
void apply_overrides(Json& document, const std::vector<std::string>& overrides, Problems& problems,
                     std::vector<std::string>& notes);

/// The honoured keys that a document gives, by path; what stands for its default ("auto", null) is left out.
class Values {
 public:
  Values();
  ~Values();
  Values(Values&&) noexcept;
  Values& operator=(Values&&) noexcept;

  bool has(std::string_view path) const;
  /// The value as checked against the table; nothing when it is not given.
  std::optional<std::int64_t> integer(std::string_view path) const;
  std::optional<double> number(std::string_view path) const;
  std::optional<bool> boolean(std::string_view path) const;
  std::optional<std::string> text(std::string_view path) const;
  std::optional<std::int64_t> size(std::string_view path) const;
  std::vector<double> numbers(std::string_view path) const;
  std::vector<std::string> texts(std::string_view path) const;
  /// nullptr when it is not given.
  const Json* json(std::string_view path) const;
  /// True when it is given as "auto".
  bool is_automatic(std::string_view path) const;
  std::vector<std::string> automatic_paths() const;
  /// Paths of all that is given but not as "auto", in ascending order.
  std::vector<std::string> paths() const;
  /// Last names of the given keys within a block.
  std::vector<std::string> names_within(std::string_view block) const;

  void put(std::string path, const Json& value);
  void put_automatic(std::string path);

 private:
  struct Store;
  std::unique_ptr<Store> store_;
};

/// Walks a document along the table: unknown keys, refused ones and wrong types go to `problems`, keys
/// without a meaning to `ignored`, the rest is returned. Unknown keys of the top level that are not near a
/// known one go to `ignored` too, unless `strict`.
Values check_keys(const Json& document, bool strict, Problems& problems, std::vector<IgnoredKey>& ignored);

/// A configuration before its problems are raised.
struct Reading {
  Values values;
  Problems problems;
  Config config;  ///< complete when there are no problems
  int ranks = 1;
};
/// Reads JSON text. Without `ranks`: for as many as its three batch figures say, else 1.
Reading read_config_text(std::string_view text, std::optional<int> ranks,
                         const std::vector<std::string>& overrides, bool strict, const std::string& origin);
/// The value that "auto" became, as JSON.
std::string value_of_automatic(const std::string& path, const Config& config);

/// The names of the optimizers that make_optimizer() makes.
const std::vector<std::string>& optimizer_types();
/// The keys of optimizer.params that belong to one of them; AdamW's for any other name.
std::vector<std::string> optimizer_parameters(std::string_view type);
/// True when `type` names a known optimizer (block "optimizer") or schedule (block "scheduler").
bool is_known_type(std::string_view block, const Json& type);

/// The text in small letters.
std::string lower(std::string text);
/// An integer that lands in an int field; a problem, and `otherwise`, where it does not fit.
int small_integer(const Values& values, std::string_view path, int otherwise, Problems& problems);

// Keys that fill more than one field each, or are read in more than one way.

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

/// Calls `each` with the name and the field of each key of tranche.parameter_groups[] but its pattern.
template <typename Rule, typename Each>
void each_value(Rule& rule, const Each& each) {
  each("learning_rate_factor", rule.learning_rate_factor);
  each("decay", rule.decay);
  each("learning_rate", rule.learning_rate);
  each("weight_decay", rule.weight_decay);
  each("betas", rule.betas);
  each("eps", rule.epsilon);
}

/// Fields from values; parse_config without the checks across fields.
Config config_from(const Values& values, Problems& problems);
/// Checks across fields, for a Config from anywhere; completes the batch.
void check_fields(Config& config, int ranks, Problems& problems);
/// A line in Config::notes for each thing that the same file means otherwise in DeepSpeed, and one for what
/// "auto" stands for. For a complete Config.
void note_differences(const Values& values, Config& config);
/// Combines the keys of offloaded state, and checks them against each other.
void read_offload(const Values& values, Config& config, Problems& problems);
void check_offload(Config& config, Problems& problems);
/// True when the schedule's parameters can be read and built; problems name their keys.
void check_schedule(const Config& config, Problems& problems);
/// "fp32" and its other spellings; nothing for anything else.
std::optional<DataType> data_type_from(std::string_view text);
/// A number of bytes; nothing when the text is none.
std::optional<std::int64_t> size_from(std::string_view text);

}  // namespace tranche::detail
