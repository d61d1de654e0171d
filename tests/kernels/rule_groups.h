#pragma once
/// The arguments for updates by a rule: several groups, one of which is skipped.

#include <algorithm>
#include <string_view>
#include <vector>

#include "tranche/core/error.h"
#include "tranche/kernels/optimizer_update.h"
#include "vector_test_support.h"

namespace tranche::kernels::testing {

/// Finds a rule by one of its type names or, if it has none, by the name of its kernel.
inline const UpdateRule& rule_named(std::string_view name) {
  for (const UpdateRule* rule : built_in_rules()) {
    if (rule->kernel == name) return *rule;
    if (std::find(rule->types.begin(), rule->types.end(), name) != rule->types.end()) return *rule;
  }
  throw LogicError("no such rule");
}

struct RuleGroups {
  static constexpr int count = 3;
  std::vector<std::byte, TestAllocator<std::byte>> bytes;
  std::int64_t stride = 0;

  /// The rate of each group is larger than the previous one's; `skipped` -1: none is skipped.
  RuleGroups(const RuleValues& values, double rate, int skipped, std::int64_t step = 3)
      : stride(static_cast<std::int64_t>((values.rule().argument_bytes + 15) / 16 * 16)) {
    for (int group = 0; group < count; ++group) {
      UpdateFacts facts;
      facts.step = step;
      facts.learning_rate = rate * (1 + group);
      facts.gradient_scale = 0.37f;
      facts.apply = group != skipped;
      const std::vector<std::byte> numbers = values.rule().arguments(values, facts);
      bytes.insert(bytes.end(), numbers.begin(), numbers.end());
      bytes.resize(static_cast<std::size_t>(stride * (group + 1)));
    }
  }
  void give_to(RuleOperands& operands) const {
    operands.arguments = bytes.data();
    operands.groups = count;
    operands.stride = stride;
  }
};

}  // namespace tranche::kernels::testing
