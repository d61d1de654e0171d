#pragma once
/// The one table of configuration keys: what becomes of each. docs/reference/configuration.md mirrors it; a
/// test compares.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

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

struct ConfigKey {
  std::string_view path;  ///< "zero_optimization.stage"; "[]" after a list's name stands for its entries
  KeyClass key_class = KeyClass::honoured;
  ValueKind kind = ValueKind::any;
  bool automatic = false;          ///< "auto" may stand for the default
  std::string_view default_value;  ///< as written in JSON, for the documentation; refused: also accepted
  std::string_view text;           ///< meaning, or why it has none, or why it is refused
};

/// One row of the table, by what becomes of the key.
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

/// All keys, parents before their children.
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

}  // namespace tranche::detail
