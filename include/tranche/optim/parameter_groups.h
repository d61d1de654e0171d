#pragma once
/// Parameter groups, by name pattern: tensors with their own values in the update (decay, learning rate ...),
/// and frozen tensors.

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/optim/optimizer.h"

namespace tranche {

/// Shell-style match of the whole name: '*' matches any run of characters, '?' one.
bool matches_pattern(std::string_view name, std::string_view pattern);

/// A field that is not set keeps the value of earlier rules, or finally the default.
struct ParameterGroupRule {
  std::string pattern;
  std::optional<double> learning_rate_factor;
  std::optional<bool> decay;
  std::optional<double> learning_rate = {};  ///< replaces the schedule's, in every step
  std::optional<double> weight_decay = {};   ///< the decay of the tensors, whatever their dimensions
  std::optional<std::array<double, 2>> betas = {};
  std::optional<double> epsilon = {};
  friend bool operator==(const ParameterGroupRule&, const ParameterGroupRule&) = default;
};

/// Later rules take precedence. The default rule: factor 1, and tensors of rank < 2 (biases, norms) do not
/// decay.
class ParameterGroups {
 public:
  ParameterGroups() = default;
  /// Throws InvalidArgument on an empty pattern, and on invalid values: betas outside [0, 1), others that are
  /// negative or not finite, a weight decay together with decay = false.
  ParameterGroups(std::vector<ParameterGroupRule> rules, std::vector<std::string> frozen_patterns);
  GroupOptions resolve(std::string_view tensor, int tensor_rank) const;
  bool frozen(std::string_view tensor) const;
  /// The patterns that match none of `tensors`; callers report them as an error.
  std::vector<std::string> unmatched(const std::vector<std::string>& tensors) const;
  /// The configuration keys that may have given a pattern: "tranche.frozen", or for a rule that only switches
  /// the decay "tranche.no_decay or tranche.parameter_groups".
  std::string keys_of(std::string_view pattern) const;

 private:
  std::vector<ParameterGroupRule> rules_;
  std::vector<std::string> frozen_;
};

}  // namespace tranche
