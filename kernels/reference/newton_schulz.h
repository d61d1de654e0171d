#pragma once
/// Plain fp64 statement of kernels/newton_schulz.h, single-threaded. For tests.

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace tranche::kernels::reference {

/// The steps' polynomial of a matrix [rows, columns] that is first divided by norm_factor times its norm.
std::vector<double> newton_schulz(std::span<const std::array<double, 3>> steps, double norm_factor,
                                  std::int64_t rows, std::int64_t columns, std::span<const double> matrix);

}  // namespace tranche::kernels::reference
