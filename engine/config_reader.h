#pragma once
/// Inside of the configuration's reading: JSON text to values that the table of keys allows. Not for users.

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/engine/config.h"

namespace tranche::detail {

/// Keeps the order of the file, so that problems are told in it.
using Json = nlohmann::ordered_json;

/// What is wrong with a configuration, one line each, all told in one error.
class Problems {
 public:
  void add(std::string line) { lines_.push_back(std::move(line)); }
  bool empty() const noexcept { return lines_.empty(); }
  /// Throws ConfigurationError with every line, `origin` in front, unless there are none.
  void raise(const std::string& origin) const;

 private:
  std::vector<std::string> lines_;
};

/// Parses strict JSON. Throws ConfigurationError with line and column, or the path of a key that is there
/// twice.
Json read_json(std::string_view text, const std::string& origin);

/// Puts "key.path=value" texts into the document; a value is JSON, or else text.
void apply_overrides(Json& document, const std::vector<std::string>& overrides, Problems& problems);

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
  /// Last names of the given keys within a block.
  std::vector<std::string> names_within(std::string_view block) const;

  void put(std::string path, const Json& value);

 private:
  struct Store;
  std::unique_ptr<Store> store_;
};

/// Walks a document along the table: unknown keys, refused ones and wrong types go to `problems`, keys
/// without a meaning to `notes`, the rest is returned.
Values check_keys(const Json& document, Problems& problems, std::vector<std::string>& notes);

/// Fields from values; parse_config without the checks across fields.
Config config_from(const Values& values, Problems& problems);
/// Checks across fields, for a Config from anywhere; completes the batch.
void check_fields(Config& config, int ranks, Problems& problems);
/// The same three for what lives beside the device (OffloadConfig and the bandwidth of its link).
void read_offload(const Values& values, Config& config, Problems& problems);
void check_offload(Config& config, Problems& problems);
void write_offload(const Config& config, Json& json);
/// Whether the schedule's parameters can be read and built; problems name their keys.
void check_schedule(const Config& config, Problems& problems);
/// "fp32" and its other spellings; nothing for anything else.
std::optional<DataType> data_type_from(std::string_view text);
/// A number of bytes; nothing when the text is none.
std::optional<std::int64_t> size_from(std::string_view text);

}  // namespace tranche::detail
