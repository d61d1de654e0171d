#include "tranche/optim/parameter_groups.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "tranche/core/error.h"

namespace tranche {

bool matches_pattern(std::string_view name, std::string_view pattern) {
  // A greedy match that can backtrack to one point: the last '*' and the name position at which it was tried.
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
    const std::pair<const char*, std::optional<double>> values[] = {
        {"a learning rate factor", rule.learning_rate_factor},
        {"a learning rate", rule.learning_rate},
        {"a weight decay", rule.weight_decay},
        {"an epsilon", rule.epsilon}};
    for (const auto& [what, value] : values) {
      if (value && (!std::isfinite(*value) || *value < 0)) {
        throw InvalidArgument(
            fmt::format("parameter group '{}' has {} of {}; it must be finite and not negative", rule.pattern,
                        what, *value));
      }
    }
    for (const double beta : rule.betas.value_or(std::array{0.0, 0.0})) {
      if (!(beta >= 0 && beta < 1)) {
        throw InvalidArgument(
            fmt::format("parameter group '{}' has betas [{}, {}]; each must be at least 0 and below 1",
                        rule.pattern, (*rule.betas)[0], (*rule.betas)[1]));
      }
    }
    if (rule.weight_decay.value_or(0) > 0 && !rule.decay.value_or(true)) {
      throw InvalidArgument(
          fmt::format("parameter group '{}' has a weight decay of {} and does not decay; drop one of the two",
                      rule.pattern, *rule.weight_decay));
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
    options.decay = rule.decay.value_or(rule.weight_decay ? true : options.decay);
    if (rule.learning_rate) options.learning_rate = rule.learning_rate;
    if (rule.weight_decay) options.weight_decay = rule.weight_decay;
    if (rule.betas) options.betas = rule.betas;
    if (rule.epsilon) options.epsilon = rule.epsilon;
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

std::string ParameterGroups::keys_of(std::string_view pattern) const {
  const auto rule =
      std::find_if(rules_.begin(), rules_.end(), [&](const auto& each) { return each.pattern == pattern; });
  if (rule == rules_.end()) return "tranche.frozen";
  const std::string groups = "tranche.parameter_groups";
  const bool decay_alone = rule->decay && !(rule->learning_rate_factor || rule->learning_rate ||
                                            rule->weight_decay || rule->betas || rule->epsilon);
  if (!decay_alone) return groups;
  return (*rule->decay ? "tranche.decay or " : "tranche.no_decay or ") + groups;
}

}  // namespace tranche
