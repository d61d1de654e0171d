#pragma once
/// Plain fp64 statement of kernels/squared_error.h, single-threaded. For tests and the fp64 reference
/// trainer.

#include <cstdint>
#include <span>

namespace tranche::kernels::reference {

/// The sum over rows of the mean over columns of (y - target)^2.
double squared_error(std::int64_t columns, std::span<const double> y, std::span<const double> target);

/// d_y = 2 * scale * (y - target) / columns.
void squared_error_gradient(std::int64_t columns, std::span<const double> y, std::span<const double> target,
                            double scale, std::span<double> d_y);

}  // namespace tranche::kernels::reference
