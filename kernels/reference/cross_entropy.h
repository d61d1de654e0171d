#pragma once
/// Plain fp64 statement of kernels/cross_entropy.h on whole logits, single-threaded. For tests and the fp64
/// reference trainer.

#include <cstdint>
#include <span>

namespace tranche::kernels::reference {

struct CrossEntropyResult {
  double loss_sum = 0;  ///< sum over rows that are not ignored of -log softmax(logits)[target]
  std::int64_t tokens = 0;
};

/// logits [targets.size(), vocabulary]; rows whose target is kernels::ignored_label are left out.
CrossEntropyResult cross_entropy_forward(std::int64_t vocabulary, std::span<const double> logits,
                                         std::span<const std::int32_t> targets);

/// d_logits = (softmax(logits) - onehot(target)) * scale, zero for ignored rows.
void cross_entropy_backward(std::int64_t vocabulary, std::span<const double> logits,
                            std::span<const std::int32_t> targets, double scale, std::span<double> d_logits);

}  // namespace tranche::kernels::reference
