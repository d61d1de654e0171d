#pragma once
/// Muon: hidden matrices are computed as a whole, other tensors use AdamW. Private to optim/.

#include <memory>

#include "tranche/kernels/update_rule.h"
#include "tranche/optim/optimizer.h"

namespace tranche::detail {

/// `values` are of the rule Muon; muon_lr and adam_lr are applied relative to `learning_rate`. Throws as
/// make_rule_optimizer() does.
std::unique_ptr<Optimizer> make_muon(const RuleValues& values, DataType moments, double learning_rate);

}  // namespace tranche::detail
