#include "kernels/reference/elementwise.h"

#include <cmath>

namespace tranche::kernels::reference {

namespace {
constexpr double root = 0.79788456080286535588;  // sqrt(2 / pi)
constexpr double cubic = 0.044715;
}  // namespace

void add(std::span<const double> a, std::span<const double> b, std::span<double> out) {
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = a[i] + b[i];
}

void add_bias(std::int64_t rows, std::int64_t columns, std::span<double> x, std::span<const double> bias) {
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t column = 0; column < columns; ++column) {
      x[static_cast<std::size_t>(row * columns + column)] += bias[static_cast<std::size_t>(column)];
    }
  }
}

void bias_gradient(std::int64_t rows, std::int64_t columns, std::span<const double> gradient,
                   std::span<double> bias_gradient) {
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t column = 0; column < columns; ++column) {
      bias_gradient[static_cast<std::size_t>(column)] +=
          gradient[static_cast<std::size_t>(row * columns + column)];
    }
  }
}

double gelu(double x) {
  // 1 + tanh(u) = 2 / (1 + exp(-2u)) without its cancellation for negative u.
  return x / (1.0 + std::exp(-2.0 * root * (x + cubic * x * x * x)));
}

double gelu_derivative(double x) {
  const double u = root * (x + cubic * x * x * x);
  const double rising = 1.0 / (1.0 + std::exp(-2.0 * u));
  const double falling = 1.0 / (1.0 + std::exp(2.0 * u));
  return rising + 2.0 * x * rising * falling * root * (1.0 + 3.0 * cubic * x * x);
}

void gelu_forward(std::span<const double> x, std::span<double> y) {
  for (std::size_t i = 0; i < y.size(); ++i) y[i] = gelu(x[i]);
}

void gelu_backward(std::span<const double> x, std::span<const double> dy, std::span<double> dx) {
  for (std::size_t i = 0; i < dx.size(); ++i) dx[i] = dy[i] * gelu_derivative(x[i]);
}

void dropout(std::span<const double> factors, std::span<const double> x, std::span<double> y) {
  for (std::size_t i = 0; i < y.size(); ++i) y[i] = x[i] * factors[i];
}

}  // namespace tranche::kernels::reference
