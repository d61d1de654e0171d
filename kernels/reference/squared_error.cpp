#include "kernels/reference/squared_error.h"

namespace tranche::kernels::reference {

double squared_error(std::int64_t columns, std::span<const double> y, std::span<const double> target) {
  double sum = 0;
  for (std::size_t i = 0; i < y.size(); ++i) sum += (y[i] - target[i]) * (y[i] - target[i]);
  return sum / static_cast<double>(columns);
}

void squared_error_gradient(std::int64_t columns, std::span<const double> y, std::span<const double> target,
                            double scale, std::span<double> d_y) {
  for (std::size_t i = 0; i < y.size(); ++i) {
    d_y[i] = 2 * scale * (y[i] - target[i]) / static_cast<double>(columns);
  }
}

}  // namespace tranche::kernels::reference
