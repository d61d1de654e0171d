#pragma once
/// Plain fp64 statement of kernels/layer_norm.h, single-threaded. For tests and the fp64 reference trainer.

#include <cstdint>
#include <span>

namespace tranche::kernels::reference {

/// y[rows, columns] = (x - mean) * rstd * weight + bias; mean and rstd [rows] are written.
void layer_norm_forward(std::int64_t rows, std::int64_t columns, std::span<const double> x,
                        std::span<const double> weight, std::span<const double> bias, double epsilon,
                        std::span<double> y, std::span<double> mean, std::span<double> rstd);

/// dx = (or += with accumulate_dx) the gradient of x; weight_gradient and bias_gradient [columns] are added
/// to.
void layer_norm_backward(std::int64_t rows, std::int64_t columns, std::span<const double> dy,
                         std::span<const double> x, std::span<const double> weight,
                         std::span<const double> mean, std::span<const double> rstd, bool accumulate_dx,
                         std::span<double> dx, std::span<double> weight_gradient,
                         std::span<double> bias_gradient);

}  // namespace tranche::kernels::reference
