#pragma once
#include "kernels/meta/cost.h"
#include "tranche/kernels/optimizer_update.h"

namespace tranche::kernels::meta {

/// The cost of updating `covered` elements. A masked update counts like any other, because skipped steps
/// issue the same work. Data that is read once counts once: the states that are read again after
/// RulePhase::advance are in a cache.
inline Cost rule_update(const UpdateRule& rule, RulePhase phase, const RuleOperands& of,
                        std::int64_t covered) {
  const auto elements = static_cast<double>(covered);
  const auto bytes = [&](const ConstTensorView& view) {
    const std::int64_t block = block_elements_of(view.dtype);
    return elements * static_cast<double>(bytes_of(view.dtype, block)) / static_cast<double>(block);
  };
  double states = 0;
  for (const TensorView& state : of.state) states += bytes(state);
  const bool states_too = phase == RulePhase::update || (phase == RulePhase::advance) == rule.states_first;
  const bool gradient_too = phase != RulePhase::finish || !rule.states_first;
  const bool states_read = phase != RulePhase::advance || rule.states_first;
  const double halves = of.master.dtype == DataType::uint16 ? bytes(of.weight) : 0;
  const double read =
      halves + bytes(of.master) + (states_read ? states : 0) + (gradient_too ? bytes(of.gradient) : 0);
  double written = states_too ? states : 0;
  if (phase != RulePhase::advance) {
    written += bytes(of.master) + (of.weight.data == nullptr ? 0 : bytes(of.weight));
  }
  const double share = phase == RulePhase::update ? 1 : 0.5;
  return {share * rule.operations(of.slots) * elements, read, written};
}

}  // namespace tranche::kernels::meta
