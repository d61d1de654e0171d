#pragma once
/// The one table of configuration keys: the meaning of each key, and the field of Config that it fills.
/// docs/reference/configuration.md mirrors it; a test compares.

#include <array>
#include <cstdint>
#include <limits>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "config/names.h"
#include "config/reader.h"
#include "tranche/config/config.h"

namespace tranche::detail {

/// honoured: read into Config. no_meaning: accepted, a line in Config::notes. refused: an error with the
/// reason, except for values that ask for nothing (null, false, "none", {}, a block with enabled = false, the
/// row's own).
enum class KeyClass : std::uint8_t { honoured, no_meaning, refused };
std::string_view name_of(KeyClass key_class);

/// The types of values that a honoured key may hold. Integers may be written as floats with an integral value
/// (5e8); a size is bytes or text such as "16GiB". null is the default everywhere.
enum class ValueKind : std::uint8_t { boolean, integer, number, text, size, numbers, texts, block, any };
std::string_view name_of(ValueKind kind);

template <>
inline constexpr auto names_of<KeyClass> = std::to_array<std::string_view>({"honoured", "no meaning",
                                                                            "refused"});
template <>
inline constexpr auto names_of<ValueKind> = std::to_array<std::string_view>(
    {"true or false", "an integer", "a number", "text", "a size (bytes, or text such as \"16GiB\")",
     "a list of numbers", "a list of texts", "a block {...}", "any value"});

/// A field that a text of a list names: the byte of the enum (or bool) is the text's number.
struct NamedField {
  unsigned char* value;
  std::span<const std::string_view> names;
};
template <typename E>
NamedField named_field(E& field, std::span<const std::string_view> names) {
  static_assert(sizeof(E) == 1);
  return {reinterpret_cast<unsigned char*>(&field), names};
}
/// A field of a Config, by its type; void*: of a row that reads and writes it in its own way.
using FieldPointer = std::variant<bool*, int*, std::int64_t*, std::uint64_t*, double*, std::string*,
                                  std::vector<std::string>*, DataType*, NamedField, void*>;

/// The values that a number may have: any while `wrong` is empty.
struct FieldRange {
  double least = 0, most = 0, multiple_of = 0;  ///< multiple_of 0: no such bound
  bool or_zero = false;                         ///< 0 is allowed beside them
  std::string_view wrong = {};                  ///< "{0} is not between {1} and {2}": the value, least, most
};

/// One row of the table. Without more a key that has a field is read as the field's type says, and written
/// always.
struct ConfigKey {
  std::string_view path;  ///< "zero_optimization.stage"; "[]" after a list's name stands for its entries
  KeyClass key_class = KeyClass::honoured;
  ValueKind kind = ValueKind::any;
  bool automatic = false;          ///< "auto" may stand for the default
  std::string_view default_value;  ///< as written in JSON, for the documentation; refused: also accepted
  std::string_view text;           ///< meaning, or why it has none, or why it is refused

  FieldPointer (*field)(Config&) = nullptr;
  std::string_view other = {};    ///< a second name of the key
  std::string_view choices = {};  ///< of a text: "automatic, uring, threads"
  FieldRange range = {};
  bool zero_is_default = false, zero_is_null = false, any_case = false, same_results = false;
  bool only_if_written = false, unless_default = false;
  bool (*written)(const Config&) = nullptr;                   ///< nullptr: always
  Json (*value)(const Config&) = nullptr;                     ///< is written in place of the field
  void (*read)(const Values&, Config&, Problems&) = nullptr;  ///< reads in place of the field's type

 private:
  template <typename T>
  constexpr ConfigKey with(T ConfigKey::*member, std::type_identity_t<T> entry) const {
    ConfigKey row = *this;
    row.*member = entry;
    return row;
  }

 public:
  // Each of these returns a copy of the row with one property changed.

  constexpr ConfigKey may_be_auto() const { return with(&ConfigKey::automatic, true); }
  constexpr ConfigKey of_kind(ValueKind values) const { return with(&ConfigKey::kind, values); }
  /// The default in words, or in JSON where reading a file begins with another one than C++.
  constexpr ConfigKey otherwise(std::string_view words) const {
    return with(&ConfigKey::default_value, words);
  }
  constexpr ConfigKey or_as(std::string_view path_too) const { return with(&ConfigKey::other, path_too); }
  constexpr ConfigKey one_of(std::string_view texts) const { return with(&ConfigKey::choices, texts); }
  constexpr ConfigKey within(FieldRange values) const { return with(&ConfigKey::range, values); }
  constexpr ConfigKey at_least(double least) const {
    return within({.least = least,
                   .most = std::numeric_limits<double>::infinity(),
                   .wrong = "{0} is not at least {1}"});
  }
  constexpr ConfigKey between(double least, double most) const {
    return within({.least = least, .most = most, .wrong = "{0} is not between {1} and {2}"});
  }
  /// A 0 of the file is taken as the default, with a note.
  constexpr ConfigKey zero_for_default() const { return with(&ConfigKey::zero_is_default, true); }
  constexpr ConfigKey zero_as_null() const { return with(&ConfigKey::zero_is_null, true); }
  constexpr ConfigKey in_any_case() const { return with(&ConfigKey::any_case, true); }
  /// The key, and what is in its block, changes no weight, loss or schedule (docs/internals/numerics.md), or
  /// only summarises other keys.
  constexpr ConfigKey quiet() const { return with(&ConfigKey::same_results, true); }
  /// Left out otherwise, as in what versions without the key saved.
  constexpr ConfigKey written_if(bool (*condition)(const Config&)) const {
    return with(&ConfigKey::written, condition);
  }
  constexpr ConfigKey written_if_set() const { return with(&ConfigKey::unless_default, true); }
  /// Neither written nor read otherwise.
  constexpr ConfigKey only_if(bool (*condition)(const Config&)) const {
    return written_if(condition).with(&ConfigKey::only_if_written, true);
  }
  constexpr ConfigKey written_as(Json (*json)(const Config&)) const { return with(&ConfigKey::value, json); }
  constexpr ConfigKey read_by(void (*reader)(const Values&, Config&, Problems&)) const {
    return with(&ConfigKey::read, reader);
  }
  constexpr ConfigKey bound_to(FieldPointer (*place)(Config&)) const {
    return with(&ConfigKey::field, place);
  }
};

template <typename T>
FieldPointer pointer_to(T& field) {
  if constexpr (std::is_enum_v<T> && !std::is_same_v<T, DataType>) {
    return named_field(field, names_of<T>);
  } else {
    return &field;
  }
}

/// The row of the field that the members lead to from a Config: field<&Config::debug,
/// &DebugConfig::plan_memory>.
template <auto... members>
constexpr ConfigKey field(std::string_view path, std::string_view text) {
  using T = std::remove_reference_t<decltype((std::declval<Config&>().*....*members))>;
  constexpr ValueKind kind = std::is_same_v<T, bool>                       ? ValueKind::boolean
                             : std::is_integral_v<T>                       ? ValueKind::integer
                             : std::is_floating_point_v<T>                 ? ValueKind::number
                             : std::is_same_v<T, std::vector<std::string>> ? ValueKind::texts
                                                                           : ValueKind::text;
  ConfigKey row{path, KeyClass::honoured, kind, false, {}, text};
  return row.bound_to([](Config& config) { return pointer_to((config.*....*members)); });
}

/// The row with a field that its read_by() and written_as() are for, or that is read together with others.
template <auto... members>
constexpr ConfigKey own(const ConfigKey& row) {
  return row.bound_to(
      [](Config& config) { return FieldPointer(static_cast<void*>(&(config.*....*members))); });
}

// Rows without a field of their own, by what becomes of the key.
constexpr ConfigKey block_of(std::string_view path, std::string_view text) {
  return {path, KeyClass::honoured, ValueKind::block, false, "{}", text};
}
constexpr ConfigKey honoured(std::string_view path, ValueKind kind, std::string_view default_value,
                             std::string_view text) {
  return {path, KeyClass::honoured, kind, false, default_value, text};
}
/// Hugging Face writes "auto" here.
constexpr ConfigKey automatic(std::string_view path, ValueKind kind, std::string_view default_value,
                              std::string_view text) {
  return {path, KeyClass::honoured, kind, true, default_value, text};
}
constexpr ConfigKey no_meaning(std::string_view path, std::string_view text) {
  return {path, KeyClass::no_meaning, ValueKind::any, true, "", text};
}
constexpr ConfigKey refused(std::string_view path, std::string_view harmless, std::string_view text) {
  return {path, KeyClass::refused, ValueKind::any, false, harmless, text};
}

/// All keys, parents before their children, in the order in which a configuration is written.
std::span<const ConfigKey> configuration_keys();
/// nullptr when the table does not have it.
const ConfigKey* find_configuration_key(std::string_view path);
/// Names of the keys directly within a block ("" for the top level).
std::vector<std::string> keys_within(std::string_view block);
/// The suggestion for an unknown key: a key of the same block that is near, or the path of a key of that
/// very name elsewhere; empty when there is none.
std::string suggest_key(std::string_view block, std::string_view name);

/// The key of the top level for which an unknown one there is a typing error: two edits away at most (short
/// names begin with the same letter too), or the same but for "train_" in front and "_per_gpu" behind. Empty
/// when there is none.
std::string mistyped_key(std::string_view name);

std::span<const ConfigKey> training_keys();
std::span<const ConfigKey> deepspeed_keys();

/// {}: of a block that is written before what stands between it and its keys.
Json empty_block(const Config& config);
/// Reads the row's field; a Config without the key keeps its value.
void read_field(const ConfigKey& key, const Values& values, Config& config, Problems& problems);
/// The JSON value of the key's field, also for a key that write_field() leaves out.
Json value_of(const ConfigKey& key, const Config& config);
/// Writes the key at its place, where it is to be written.
void write_field(const ConfigKey& key, const Config& config, Json& document);
/// Tells a value out of the row's range or choices.
void check_field(const ConfigKey& key, const Config& config, Problems& problems);

}  // namespace tranche::detail
