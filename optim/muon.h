#pragma once
/// Muon: hidden matrices whole, other tensors by AdamW. Private to optim/.

#include <memory>

#include "tranche/kernels/update_rule.h"
#include "tranche/optim/optimizer.h"

namespace tranche::detail {

/// `values` are of the rule Muon; `learning_rate` is what muon_lr and adam_lr are multiples of. Throws as
/// make_rule_optimizer() does.
std::unique_ptr<Optimizer> make_muon(const RuleValues& values, DataType moments, double learning_rate);

}  // namespace tranche::detail
