#include "kernels/reference/rms_norm.h"

#include <cmath>
#include <cstddef>

namespace tranche::kernels::reference {

void rms_norm_forward(std::int64_t rows, std::int64_t columns, std::span<const double> x,
                      std::span<const double> weight, double epsilon, std::span<double> out,
                      std::span<double> rstd) {
  const auto width = static_cast<std::size_t>(columns);
  for (std::size_t r = 0; r < static_cast<std::size_t>(rows); ++r) {
    const auto row = x.subspan(r * width, width);
    double squares = 0;
    for (double value : row) squares += value * value;
    rstd[r] = 1.0 / std::sqrt(squares / static_cast<double>(columns) + epsilon);
    for (std::size_t c = 0; c < width; ++c) out[r * width + c] = row[c] * rstd[r] * weight[c];
  }
}

void rms_norm_backward(std::int64_t rows, std::int64_t columns, std::span<const double> d_out,
                       std::span<const double> x, std::span<const double> weight,
                       std::span<const double> rstd, bool accumulate, std::span<double> d_x,
                       std::span<double> weight_gradient) {
  const auto width = static_cast<std::size_t>(columns);
  const auto count = static_cast<double>(columns);
  for (std::size_t r = 0; r < static_cast<std::size_t>(rows); ++r) {
    // With h = x rstd and g = d_out weight: d_x = rstd (g - h mean(g h)).
    double mean_gh = 0;
    for (std::size_t c = 0; c < width; ++c) {
      const std::size_t i = r * width + c;
      const double h = x[i] * rstd[r];
      mean_gh += d_out[i] * weight[c] * h / count;
      weight_gradient[c] += d_out[i] * h;
    }
    for (std::size_t c = 0; c < width; ++c) {
      const std::size_t i = r * width + c;
      const double gradient = rstd[r] * (d_out[i] * weight[c] - x[i] * rstd[r] * mean_gh);
      d_x[i] = accumulate ? d_x[i] + gradient : gradient;
    }
  }
}

}  // namespace tranche::kernels::reference
