#pragma once
/// The differences between two effective configurations.

#include <string>
#include <string_view>
#include <vector>

namespace tranche::detail {

/// A value that differs between two JSON objects, with both values as texts ("'a'", "0.5", "not set").
struct ChangedValue {
  std::string key;  ///< its path, like "optimizer.params.lr"
  std::string is, was;
  /// "optimizer.params.lr is 0.0001, was 0.001"
  std::string line() const { return key + " is " + is + ", was " + was; }
};
/// Compares the values of two JSON objects that are not objects themselves; a text that is no object has
/// none.
std::vector<ChangedValue> changed_values(std::string_view saved, std::string_view present);

/// Compares two effective configurations (Config::to_json()); returns a line for each key that differs. Keys
/// without influence on results (threads, buckets, time-outs, prints ...) are left out, and so is
/// tranche.total_steps if the learning rate does not depend on it.
std::vector<std::string> configuration_changes(std::string_view saved, std::string_view present);

}  // namespace tranche::detail
