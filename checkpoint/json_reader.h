#pragma once
/// Strict access to JSON that a program wrote: every complaint names the file and the key.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace tranche::checkpoint {

using Json = nlohmann::ordered_json;

/// A value and where it stands: "step-00000012/manifest.json", "units[3].name". Refers to the value, which
/// must outlive it. What is not as asked is a CheckpointError.
class JsonNode {
 public:
  JsonNode(const Json& value, std::string origin, std::string path)
      : value_(&value), origin_(std::move(origin)), path_(std::move(path)) {}

  /// "ORIGIN: PATH WHAT"
  [[noreturn]] void fail(std::string_view what) const;
  JsonNode operator[](const char* key) const;
  bool has(const char* key) const;
  std::vector<JsonNode> items() const;
  std::string text() const;
  bool boolean() const;
  std::int64_t integer(std::int64_t least = INT64_MIN, std::int64_t most = INT64_MAX) const;
  std::vector<std::int64_t> integers() const;
  std::vector<std::string> texts() const;
  /// An object, as text.
  std::string object() const;

 private:
  const Json* value_;
  std::string origin_;
  std::string path_;
};

}  // namespace tranche::checkpoint
