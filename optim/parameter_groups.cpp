#include "tranche/optim/parameter_groups.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "tranche/core/error.h"

namespace tranche {

bool matches_pattern(std::string_view name, std::string_view pattern) {
  // Greedy with one point to fall back to: the last '*' seen and the name position it was tried from.
  std::size_t n = 0, p = 0, star = std::string_view::npos, tried = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      tried = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p;
      ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++tried;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

ParameterGroups::ParameterGroups(std::vector<ParameterGroupRule> rules,
                                 std::vector<std::string> frozen_patterns)
    : rules_(std::move(rules)), frozen_(std::move(frozen_patterns)) {
  for (const ParameterGroupRule& rule : rules_) {
    if (rule.pattern.empty()) throw InvalidArgument("a parameter group has an empty name pattern");
    const double factor = rule.learning_rate_factor.value_or(1);
    if (!std::isfinite(factor) || factor < 0) {
      throw InvalidArgument(fmt::format(
          "parameter group '{}' has a learning rate factor of {}; it must be finite and not negative",
          rule.pattern, factor));
    }
  }
  if (std::find(frozen_.begin(), frozen_.end(), "") != frozen_.end()) {
    throw InvalidArgument("a frozen name pattern is empty");
  }
}

GroupOptions ParameterGroups::resolve(std::string_view tensor, int tensor_rank) const {
  GroupOptions options;
  options.decay = tensor_rank >= 2;
  for (const ParameterGroupRule& rule : rules_) {
    if (!matches_pattern(tensor, rule.pattern)) continue;
    options.learning_rate_factor = rule.learning_rate_factor.value_or(options.learning_rate_factor);
    options.decay = rule.decay.value_or(options.decay);
  }
  return options;
}

bool ParameterGroups::frozen(std::string_view tensor) const {
  return std::any_of(frozen_.begin(), frozen_.end(),
                     [&](const std::string& pattern) { return matches_pattern(tensor, pattern); });
}

std::vector<std::string> ParameterGroups::unmatched(const std::vector<std::string>& tensors) const {
  std::vector<std::string> missing;
  const auto test = [&](const std::string& pattern) {
    const bool found = std::any_of(tensors.begin(), tensors.end(),
                                   [&](const std::string& name) { return matches_pattern(name, pattern); });
    if (!found && std::find(missing.begin(), missing.end(), pattern) == missing.end())
      missing.push_back(pattern);
  };
  for (const ParameterGroupRule& rule : rules_) test(rule.pattern);
  for (const std::string& pattern : frozen_) test(pattern);
  return missing;
}

}  // namespace tranche
