#pragma once
/// The optimizers that have a file (tranche/kernels/update_rule.h): the library's and the program's own.

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/kernels/update_rule.h"
#include "tranche/optim/optimizer.h"

namespace tranche {

/// A value of optimizer.params: a number, two of them, true (1) and false (0), or the number of a choice.
struct RuleValue {
  // Configurations assign numbers and pairs.
  RuleValue(double number = 0) : first(number) {}  // NOLINT(google-explicit-constructor)
  RuleValue(std::array<double, 2> both)            // NOLINT(google-explicit-constructor)
      : first(both[0]), second(both[1]), pair(true) {}
  double first = 0, second = 0;
  bool pair = false;
  friend bool operator==(const RuleValue&, const RuleValue&) = default;
};
using RuleParameters = std::map<std::string, RuleValue, std::less<>>;

/// A name for optimizer.type and the rule that it stands for.
struct RuleType {
  std::string_view name;
  const UpdateRule* rule;
};
/// AdamW first, then the others in the order of their names; the program's own come last. A program's rule
/// with a name that is taken already is not in it.
const std::vector<RuleType>& rule_types();
/// In any case of letters; nullptr when there is none.
const RuleType* find_rule(std::string_view type);

/// The nearest of what there is, for an optimizer that is known but not part of the library: "Adafactor:
/// ...". Empty for one that is not known.
std::string nearest_to_missing(std::string_view type);

/// Parameters that are not given have the rule's defaults. `moments`: fp32, bf16 or block8 (tranche.moments).
/// `learning_rate`: optimizer.params.lr, of which rates for some tensors alone (Muon's adam_lr) are multiples
/// whatever the schedule makes of it; without it the rule's default. Throws InvalidArgument for a type that
/// there is not, a parameter that it does not have or that is out of range, and moments that it does not keep
/// in that dtype.
std::unique_ptr<Optimizer> make_rule_optimizer(std::string_view type, const RuleParameters& parameters,
                                               DataType moments = DataType::float32,
                                               std::optional<double> learning_rate = std::nullopt);

}  // namespace tranche
