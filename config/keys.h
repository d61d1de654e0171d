#pragma once
/// The only table of configuration keys: the meaning of each key, and the field of Config that it sets.
/// docs/reference/configuration.md mirrors it, and a test compares them.

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

/// honoured: read into Config. no_meaning: accepted, with an entry in Config::ignored. refused: an error with
/// the reason, except for values that request nothing (null, false, "none", {}, a block with enabled = false,
/// and the row's own default_value).
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

/// A field that is set by a text of a list: the value of the enum (or bool), one byte, is the text's index.
struct NamedField {
  unsigned char* value;
  std::span<const std::string_view> names;
};
template <typename E>
NamedField named_field(E& field, std::span<const std::string_view> names) {
  static_assert(sizeof(E) == 1);
  return {reinterpret_cast<unsigned char*>(&field), names};
}
/// A pointer to a field of a Config, by its type; void* for a row with its own functions to read and write
/// it.
using FieldPointer = std::variant<bool*, int*, std::int64_t*, std::uint64_t*, double*, std::string*,
                                  std::vector<std::string>*, DataType*, NamedField, void*>;

/// The range of a number; without a limit while `wrong` is empty.
struct FieldRange {
  double least = 0, most = 0, multiple_of = 0;  ///< multiple_of 0: not restricted
  bool or_zero = false;                         ///< 0 is accepted in addition
  std::string_view wrong = {};                  ///< "{0} is not between {1} and {2}": the value, least, most
};

/// One row of the table. By default a key with a field is read according to the field's type, and always
/// written.
struct ConfigKey {
  std::string_view path;  ///< "zero_optimization.stage"; "[]" after a list's name means its entries
  KeyClass key_class = KeyClass::honoured;
  ValueKind kind = ValueKind::any;
  bool automatic = false;          ///< "auto" is accepted and means the default
  std::string_view default_value;  ///< as written in JSON, for the documentation; for refused keys this value
                                   ///< is accepted too
  std::string_view text;           ///< the meaning, or the reason why it has none or is refused

  FieldPointer (*field)(Config&) = nullptr;
  std::string_view other = {};    ///< a second name of the key
  std::string_view choices = {};  ///< for a text: "automatic, uring, threads"
  FieldRange range = {};
  bool zero_is_default = false, zero_is_null = false, any_case = false, same_results = false;
  bool only_if_written = false, unless_default = false;
  bool (*written)(const Config&) = nullptr;  ///< nullptr: always
  Json (*value)(const Config&) = nullptr;    ///< returns the value to write instead of the field's
  void (*read)(const Values&, Config&, Problems&) = nullptr;  ///< reads the key instead of the default reader

 private:
  template <typename T>
  constexpr ConfigKey with(T ConfigKey::*member, std::type_identity_t<T> entry) const {
    ConfigKey row = *this;
    row.*member = entry;
    return row;
  }

 public:
  // Each of these functions returns a copy of the row with one property changed.

  constexpr ConfigKey may_be_auto() const { return with(&ConfigKey::automatic, true); }
  constexpr ConfigKey of_kind(ValueKind values) const { return with(&ConfigKey::kind, values); }
  /// Sets the default as words, or as JSON if it differs between a file and a Config made in C++.
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
  /// A 0 in the file is replaced by the default, with a note.
  constexpr ConfigKey zero_for_default() const { return with(&ConfigKey::zero_is_default, true); }
  constexpr ConfigKey zero_as_null() const { return with(&ConfigKey::zero_is_null, true); }
  constexpr ConfigKey in_any_case() const { return with(&ConfigKey::any_case, true); }
  /// Marks a key that changes no weight, loss or schedule, nor do the keys in its block
  /// (docs/internals/numerics.md), or that only summarises other keys.
  constexpr ConfigKey quiet() const { return with(&ConfigKey::same_results, true); }
  /// The key is written only under this condition, because versions without the key did not write it.
  constexpr ConfigKey written_if(bool (*condition)(const Config&)) const {
    return with(&ConfigKey::written, condition);
  }
  constexpr ConfigKey written_if_set() const { return with(&ConfigKey::unless_default, true); }
  /// The key is written and read only under this condition.
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

/// The row of the field that these members select in a Config, such as field<&Config::debug,
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

/// The row with a field that its own read_by() and written_as() access, or that is read together with others.
template <auto... members>
constexpr ConfigKey own(const ConfigKey& row) {
  return row.bound_to(
      [](Config& config) { return FieldPointer(static_cast<void*>(&(config.*....*members))); });
}

// Rows without a field of their own, by how the key is treated.
constexpr ConfigKey block_of(std::string_view path, std::string_view text) {
  return {path, KeyClass::honoured, ValueKind::block, false, "{}", text};
}
constexpr ConfigKey honoured(std::string_view path, ValueKind kind, std::string_view default_value,
                             std::string_view text) {
  return {path, KeyClass::honoured, kind, false, default_value, text};
}
/// A row in which "auto" is accepted, because Hugging Face writes it.
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
/// Returns nullptr for a key that is not in the table.
const ConfigKey* find_configuration_key(std::string_view path);
/// Names of the keys directly within a block ("" for the top level).
std::vector<std::string> keys_within(std::string_view block);
/// The path of the key that an unknown one means: another program's name for it, or the key with exactly this
/// name elsewhere; empty if there is none.
std::string other_name_of_key(std::string_view block, std::string_view name);
/// The suggestion for an unknown key: other_name_of_key(), or a similar key of the same block; empty if there
/// is none.
std::string suggest_key(std::string_view block, std::string_view name);

/// The key of the top level that an unknown key was probably meant to be: at most two edits away (short names
/// must also have the same first letter), or equal except for a prefix "train_" and a suffix "_per_gpu".
/// Empty if there is none.
std::string mistyped_key(std::string_view name);

std::span<const ConfigKey> training_keys();
std::span<const ConfigKey> deepspeed_keys();

/// Returns {}, which fixes the place of a block in the document before other keys are written.
Json empty_block(const Config& config);
/// Reads the row's field; if the key is absent, the field keeps its value.
void read_field(const ConfigKey& key, const Values& values, Config& config, Problems& problems);
/// The JSON value of the key's field, also for a key that write_field() leaves out.
Json value_of(const ConfigKey& key, const Config& config);
/// Writes the key at its place, unless the row leaves it out.
void write_field(const ConfigKey& key, const Config& config, Json& document);
/// Reports a value outside the row's range or choices.
void check_field(const ConfigKey& key, const Config& config, Problems& problems);

}  // namespace tranche::detail
