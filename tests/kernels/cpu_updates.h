#pragma once
/// The CPU's loops of Adam and SGD with the caller's tuning.

#include <array>
#include <span>
#include <string_view>

#include "kernels/cpu/optimizer_update.h"
#include "tranche/core/error.h"

namespace tranche::kernels::cpu {

inline const UpdateRule& built_in_rule(std::string_view kernel) {
  for (const UpdateRule* rule : built_in_rules()) {
    if (rule->kernel == kernel) return *rule;
  }
  throw LogicError("no such rule");
}

template <class Arguments>
RuleOperands rule_operands(const GroupArguments<Arguments>& arguments,
                           std::span<const UpdateSegment> segments, const ConstTensorView& gradient,
                           const TensorView& master, const TensorView& weight) {
  RuleOperands of;
  of.arguments = reinterpret_cast<const std::byte*>(arguments.first);
  of.groups = arguments.groups;
  of.stride = arguments.stride;
  of.segments = segments;
  of.gradient = gradient;
  of.master = master;
  of.weight = weight;
  return of;
}

inline void adam_update(int threads, const GroupArguments<AdamArguments>& arguments,
                        std::span<const UpdateSegment> segments, const ConstTensorView& gradient,
                        const TensorView& master, const TensorView& exp_avg, const TensorView& exp_avg_sq,
                        const TensorView& weight, const UpdateTuning& tuning = update_tuning()) {
  const std::array state{exp_avg, exp_avg_sq};
  RuleOperands of = rule_operands(arguments, segments, gradient, master, weight);
  of.slots = 0b11;
  of.state = state;
  static const UpdateRule& rule = built_in_rule("adam_update");
  rule_update(threads, rule, RulePhase::update, of, tuning);
}

inline void sgd_update(int threads, const GroupArguments<SgdArguments>& arguments,
                       std::span<const UpdateSegment> segments, const ConstTensorView& gradient,
                       const TensorView& master, const TensorView& momentum_buffer, const TensorView& weight,
                       const UpdateTuning& tuning = update_tuning()) {
  RuleOperands of = rule_operands(arguments, segments, gradient, master, weight);
  if (momentum_buffer.data != nullptr) {
    of.slots = 0b1;
    of.state = {&momentum_buffer, 1};
  }
  static const UpdateRule& rule = built_in_rule("sgd_update");
  rule_update(threads, rule, RulePhase::update, of, tuning);
}

}  // namespace tranche::kernels::cpu
