#pragma once
/// Plain fp64 statement of kernels/optimizer_update.h, single-threaded. It is for tests and the fp64
/// reference trainer, which passes hyper-parameters and the step's number instead of precomputed corrections.

#include <cstdint>
#include <span>

namespace tranche::kernels::reference {

struct AdamOptions {
  double learning_rate = 0, beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, weight_decay = 0;
  double gradient_scale = 1;
  bool decoupled = true;  ///< AdamW; false: weight decay is added to the gradient
  bool bias_correction = true;
};
/// One update of `weight` and both moments; `step` counts from 1.
void adam_update(const AdamOptions& options, std::int64_t step, std::span<const double> gradient,
                 std::span<double> weight, std::span<double> exp_avg, std::span<double> exp_avg_sq);

struct SgdOptions {
  double learning_rate = 0, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false;
  double gradient_scale = 1;
};
/// One update; `step` counts from 1. momentum_buffer may be empty when momentum is 0.
void sgd_update(const SgdOptions& options, std::int64_t step, std::span<const double> gradient,
                std::span<double> weight, std::span<double> momentum_buffer);

}  // namespace tranche::kernels::reference
