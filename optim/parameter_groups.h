#pragma once
/// Which tensors decay, which have their own learning rate, which are frozen: by name pattern.

#include <string>
#include <string_view>
#include <vector>

#include "tranche/optim/optimizer.h"

namespace tranche {

/// Shell-style match of the whole name: '*' any run of characters, '?' one.
bool matches_pattern(std::string_view name, std::string_view pattern);

struct ParameterGroupRule {
  std::string pattern;
  double learning_rate_factor = 1;
  bool decay = true;
};

/// Later rules win. The default rule: tensors of rank < 2 (biases, norms) do not decay.
class ParameterGroups {
 public:
  ParameterGroups() = default;
  ParameterGroups(std::vector<ParameterGroupRule> rules, std::vector<std::string> frozen_patterns);
  GroupOptions resolve(std::string_view tensor, int tensor_rank) const;
  bool frozen(std::string_view tensor) const;
  /// Patterns that match none of `tensors`; callers make that an error.
  std::vector<std::string> unmatched(const std::vector<std::string>& tensors) const;

 private:
  std::vector<ParameterGroupRule> rules_;
  std::vector<std::string> frozen_;
};

}  // namespace tranche
