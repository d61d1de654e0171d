#pragma once
// Fused optimizer updates: one launch for a table of segments, which are kernel parameters; one read of
// gradient and state, one write of state and weight. Compiled without contraction; a rule's file defines the
// arithmetic for the CPU's loops too, so the bits are the CPU's. Each rule's launches are in a separate
// source (kernels/rules/rule.cu.in).
//
// Bytes per element, Adam: gradient + 12 read, 12 + weight written (28 with 16-bit gradient and weight). Some
// 60 instructions per element, mostly IEEE's two divisions and square root, are a third of what the
// multiprocessors can issue in that time. A rule with a trust ratio takes two passes; the first adds squares
// as gradient_statistics does (exact_squares.h), in blocks of 4096 elements, without 16-byte accesses.

#include <cstddef>
#include <iterator>
#include <utility>

#include "kernels/cuda/rule_blocks.h"
#include "kernels/cuda/rule_elements.h"

namespace tranche::kernels::cuda {

template <class Rule>
void launch_rule_of(Stream& stream, RulePhase phase, const RuleOperands& of) {
  [&]<std::size_t... k>(std::index_sequence<k...>) {
    const auto with_slots = [&]<unsigned kept>(std::integral_constant<unsigned, kept>) {
      if constexpr (kept != 0) {
        if (is_block(of.state[0].dtype)) return launch_blocks<Rule, kept>(stream, phase, of);
        if (of.state[0].dtype == DataType::bfloat16) {
          return launch_typed<Rule, kept, bfloat16>(stream, phase, of);
        }
      }
      launch_typed<Rule, kept, float>(stream, phase, of);
    };
    ((of.slots == Rule::slots[k] ? with_slots(std::integral_constant<unsigned, Rule::slots[k]>()) : void()),
     ...);
  }
  (std::make_index_sequence<std::size(Rule::slots)>());
}

}  // namespace tranche::kernels::cuda
