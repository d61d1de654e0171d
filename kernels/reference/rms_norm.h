#pragma once
/// Plain fp64 statement of kernels/rms_norm.h, single-threaded. For tests and the fp64 reference trainer.

#include <cstdint>
#include <span>

namespace tranche::kernels::reference {

/// out[rows, columns] = x * rstd * weight; rstd [rows] is written.
void rms_norm_forward(std::int64_t rows, std::int64_t columns, std::span<const double> x,
                      std::span<const double> weight, double epsilon, std::span<double> out,
                      std::span<double> rstd);

/// d_x = (or += with accumulate) the gradient of x; weight_gradient [columns] is added to.
void rms_norm_backward(std::int64_t rows, std::int64_t columns, std::span<const double> d_out,
                       std::span<const double> x, std::span<const double> weight,
                       std::span<const double> rstd, bool accumulate, std::span<double> d_x,
                       std::span<double> weight_gradient);

}  // namespace tranche::kernels::reference
