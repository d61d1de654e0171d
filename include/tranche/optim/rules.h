#pragma once
/// The optimizers that are defined by a rule file (tranche/kernels/update_rule.h): the library's and the
/// program's own.

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

/// A value of optimizer.params: a number, a pair, true (1) and false (0), or the index of a choice.
struct RuleValue {
  // The constructors are implicit, so that configurations can assign numbers and pairs.
  RuleValue(double number = 0) : first(number) {}  // NOLINT(google-explicit-constructor)
  RuleValue(std::array<double, 2> both)            // NOLINT(google-explicit-constructor)
      : first(both[0]), second(both[1]), pair(true) {}
  double first = 0, second = 0;
  bool pair = false;
  friend bool operator==(const RuleValue&, const RuleValue&) = default;
};
using RuleParameters = std::map<std::string, RuleValue, std::less<>>;

/// A name for optimizer.type and its rule.
struct RuleType {
  std::string_view name;
  const UpdateRule* rule;
};
/// AdamW first, then the others in alphabetical order; the program's own come last. A program's rule whose
/// name is already taken is left out.
const std::vector<RuleType>& rule_types();
/// Finds a rule in any case of letters; nullptr when there is none.
const RuleType* find_rule(std::string_view type);

/// The closest available rule to an optimizer that is known but not part of the library: "Adafactor: ...".
/// Empty for an unknown one.
std::string nearest_to_missing(std::string_view type);

/// Parameters that are not given have the rule's defaults. `moments`: fp32, bf16 or block8 (tranche.moments).
/// `learning_rate` is optimizer.params.lr, by default the rule's; rates for some tensors alone (Muon's
/// adam_lr) keep their ratio to it under any schedule. Throws InvalidArgument for an unknown type, an unknown
/// parameter or one out of range, and moments that the rule cannot keep in that dtype.
std::unique_ptr<Optimizer> make_rule_optimizer(std::string_view type, const RuleParameters& parameters,
                                               DataType moments = DataType::float32,
                                               std::optional<double> learning_rate = std::nullopt);

}  // namespace tranche
