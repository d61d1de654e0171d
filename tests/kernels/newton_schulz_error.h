#pragma once
/// The error of Newton-Schulz iterations against the fp64 reference.

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernel_testing.h"
#include "kernels/reference/newton_schulz.h"
#include "tranche/kernels/newton_schulz.h"

namespace tranche::kernels::testing {

/// The relative error of run(matrix) for a drawn matrix [rows, columns]; for a small one the root mean square
/// over eight. The steps enlarge rounding errors by up to 1000. In a large matrix these errors average out,
/// but the error of a single small matrix varies tenfold.
template <class Run>
double newton_schulz_error(Random& random, DataType dtype, std::int64_t rows, std::int64_t columns,
                           const NewtonSchulzOptions& options, const Run& run) {
  const int draws = rows * columns < 100 ? 8 : 1;
  double squares = 0;
  for (int draw = 0; draw < draws; ++draw) {
    const HostTensor matrix = random.tensor(dtype, {rows, columns});
    const double error = relative_error(
        run(matrix),
        reference::newton_schulz(options.steps, options.norm_factor, rows, columns, matrix.values()));
    squares += error * error;
  }
  return std::sqrt(squares / draws);
}

}  // namespace tranche::kernels::testing
