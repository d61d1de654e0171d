#include "kernels/reference/optimizer_update.h"

#include <cmath>

namespace tranche::kernels::reference {

void adam_update(const AdamOptions& options, std::int64_t step, std::span<const double> gradient,
                 std::span<double> weight, std::span<double> exp_avg, std::span<double> exp_avg_sq) {
  const auto t = static_cast<double>(step);
  const double correction1 = options.bias_correction ? 1.0 - std::pow(options.beta1, t) : 1.0;
  const double correction2 = options.bias_correction ? 1.0 - std::pow(options.beta2, t) : 1.0;
  for (std::size_t i = 0; i < weight.size(); ++i) {
    double g = gradient[i] * options.gradient_scale;
    if (options.decoupled) {
      weight[i] -= options.learning_rate * options.weight_decay * weight[i];
    } else {
      g += options.weight_decay * weight[i];
    }
    exp_avg[i] = options.beta1 * exp_avg[i] + (1.0 - options.beta1) * g;
    exp_avg_sq[i] = options.beta2 * exp_avg_sq[i] + (1.0 - options.beta2) * g * g;
    weight[i] -= options.learning_rate * (exp_avg[i] / correction1) /
                 (std::sqrt(exp_avg_sq[i] / correction2) + options.epsilon);
  }
}

void sgd_update(const SgdOptions& options, std::int64_t step, std::span<const double> gradient,
                std::span<double> weight, std::span<double> momentum_buffer) {
  for (std::size_t i = 0; i < weight.size(); ++i) {
    const double g = gradient[i] * options.gradient_scale + options.weight_decay * weight[i];
    double direction = g;
    if (options.momentum != 0) {
      double& b = momentum_buffer[i];
      b = step == 1 ? g : options.momentum * b + (1.0 - options.dampening) * g;
      direction = options.nesterov ? g + options.momentum * b : b;
    }
    weight[i] -= options.learning_rate * direction;
  }
}

}  // namespace tranche::kernels::reference
