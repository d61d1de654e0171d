#pragma once
/// Plain fp64 statement of kernels/rope.h, single-threaded. For tests and the fp64 reference trainer.

#include <cstdint>
#include <span>

namespace tranche::kernels::reference {

/// table[rows, 2 * frequencies] = cosines, then sines, of positions[row] * frequencies[i].
void rope_table(std::span<const double> frequencies, std::span<const std::int64_t> positions,
                std::span<double> table);

/// Rotates the pairs (i, i + width / 2) of each head of x[rows, heads, head_dim] in place; table is
/// [rows, width]. `inverse` rotates back.
void rope(bool inverse, std::span<const double> table, std::int64_t width, std::int64_t heads,
          std::int64_t head_dim, std::span<double> x);

}  // namespace tranche::kernels::reference
