#include "kernels/reference/layer_norm.h"

#include <cmath>
#include <cstddef>

namespace tranche::kernels::reference {

void layer_norm_forward(std::int64_t rows, std::int64_t columns, std::span<const double> x,
                        std::span<const double> weight, std::span<const double> bias, double epsilon,
                        std::span<double> y, std::span<double> mean, std::span<double> rstd) {
  const auto width = static_cast<std::size_t>(columns);
  for (std::size_t r = 0; r < static_cast<std::size_t>(rows); ++r) {
    const auto row = x.subspan(r * width, width);
    double sum = 0;
    for (double value : row) sum += value;
    mean[r] = sum / static_cast<double>(columns);
    double squares = 0;
    for (double value : row) squares += (value - mean[r]) * (value - mean[r]);
    rstd[r] = 1.0 / std::sqrt(squares / static_cast<double>(columns) + epsilon);
    for (std::size_t c = 0; c < width; ++c) {
      y[r * width + c] = (row[c] - mean[r]) * rstd[r] * weight[c] + bias[c];
    }
  }
}

void layer_norm_backward(std::int64_t rows, std::int64_t columns, std::span<const double> dy,
                         std::span<const double> x, std::span<const double> weight,
                         std::span<const double> mean, std::span<const double> rstd, bool accumulate_dx,
                         std::span<double> dx, std::span<double> weight_gradient,
                         std::span<double> bias_gradient) {
  const auto width = static_cast<std::size_t>(columns);
  const auto count = static_cast<double>(columns);
  for (std::size_t r = 0; r < static_cast<std::size_t>(rows); ++r) {
    // With h = (x - mean) rstd and g = dy weight: dx = rstd (g - mean(g) - h mean(g h)).
    double mean_g = 0, mean_gh = 0;
    for (std::size_t c = 0; c < width; ++c) {
      const double h = (x[r * width + c] - mean[r]) * rstd[r];
      const double g = dy[r * width + c] * weight[c];
      mean_g += g / count;
      mean_gh += g * h / count;
      weight_gradient[c] += dy[r * width + c] * h;
      bias_gradient[c] += dy[r * width + c];
    }
    for (std::size_t c = 0; c < width; ++c) {
      const double h = (x[r * width + c] - mean[r]) * rstd[r];
      const double gradient = rstd[r] * (dy[r * width + c] * weight[c] - mean_g - h * mean_gh);
      dx[r * width + c] = accumulate_dx ? dx[r * width + c] + gradient : gradient;
    }
  }
}

}  // namespace tranche::kernels::reference
