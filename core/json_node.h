#pragma once
/// Strict reading of JSON that comes from outside of this process.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace tranche::detail {

/// A value of a text and its path in it. A getter returns a value of the type and range that were asked for,
/// or throws an error of the type that the text was read with: "m.json: shares[0].ranks is not an integer:
/// true". Copies are cheap; the values live as long as the last node of their text. Thread-safe.
class JsonNode {
  /// Prevents a limit's type from taking part in the deduction of `Integer`.
  template <typename Integer>
  using Limit = std::type_identity_t<Integer>;

 public:
  /// Reads a whole text. Refuses the texts that parse_json() refuses ("ORIGIN is not JSON: line 1, column 5:
  /// why"), and a key that an object gives twice. `path` begins every path in messages. `Failure` is
  /// constructed from a message.
  template <typename Failure>
  static JsonNode read(std::string_view text, std::string_view origin, std::string_view path = "") {
    return read(text, origin, path, [](std::string message) { throw Failure(std::move(message)); });
  }

  /// Throws "ORIGIN: PATH WHAT".
  [[noreturn]] void fail(std::string_view what) const;
  /// True when the value exists and is not null.
  explicit operator bool() const;
  /// A member of an object. For a missing member it returns a node whose getters report that it is missing.
  JsonNode operator[](std::string_view key) const;
  /// The members of an object, in the order of the text.
  std::vector<std::pair<std::string, JsonNode>> members() const;
  /// Refuses members with other names, and suggests the closest allowed name.
  void allow(std::initializer_list<std::string_view> keys) const;
  /// The entries of a list of `least` to `most`.
  std::vector<JsonNode> items(std::size_t least = 0, std::size_t most = SIZE_MAX) const;

  std::string text() const;
  /// A text that is not empty.
  std::string name() const;
  /// A text that is one of `texts`.
  std::string choice(std::initializer_list<std::string_view> texts) const;
  bool boolean() const;
  /// A number without a fraction, written as an integer or, up to 2^53, in any other way (5e8).
  template <std::signed_integral Integer = std::int64_t>
  Integer integer(Limit<Integer> least = std::numeric_limits<Integer>::min(),
                  Limit<Integer> most = std::numeric_limits<Integer>::max()) const {
    return static_cast<Integer>(whole(least, most));
  }
  double number(double least = std::numeric_limits<double>::lowest(),
                double most = std::numeric_limits<double>::max()) const;
  /// The integer, or `otherwise` where the value is null or missing.
  template <std::signed_integral Integer = std::int64_t>
  Integer integer_or(Limit<Integer> otherwise, Limit<Integer> least = std::numeric_limits<Integer>::min(),
                     Limit<Integer> most = std::numeric_limits<Integer>::max()) const {
    return *this ? integer<Integer>(least, most) : otherwise;
  }
  double number_or(double otherwise, double least = std::numeric_limits<double>::lowest(),
                   double most = std::numeric_limits<double>::max()) const {
    return *this ? number(least, most) : otherwise;
  }
  std::vector<std::string> texts() const;
  std::vector<std::int64_t> integers(std::int64_t least = INT64_MIN, std::int64_t most = INT64_MAX) const;
  std::vector<double> numbers(double least, double most) const;
  /// An object, as JSON text.
  std::string object() const;
  /// The value without any check.
  const nlohmann::ordered_json& json() const;

 private:
  struct Source;
  using Refuse = void (*)(std::string message);

  JsonNode(std::shared_ptr<const Source> source, const nlohmann::ordered_json* value, std::string path)
      : source_(std::move(source)), value_(value), path_(std::move(path)) {}
  static JsonNode read(std::string_view text, std::string_view origin, std::string_view path, Refuse refuse);
  /// Throws the error for a value that is not of the type.
  [[noreturn]] void refuse_type(std::string_view type) const;
  const nlohmann::ordered_json& list() const;
  const nlohmann::ordered_json& block() const;
  JsonNode item(std::size_t index) const;
  std::int64_t whole(std::int64_t least, std::int64_t most) const;

  std::shared_ptr<const Source> source_;
  const nlohmann::ordered_json* value_;  ///< null: missing
  std::string path_;
};

}  // namespace tranche::detail
