#pragma once
/// Plain fp64 statement of kernels/elementwise.h, single-threaded. For tests and the fp64 reference trainer.

#include <cstdint>
#include <span>

namespace tranche::kernels::reference {

/// out = a + b; in place is allowed.
void add(std::span<const double> a, std::span<const double> b, std::span<double> out);
/// x[r, :] += bias.
void add_bias(std::int64_t rows, std::int64_t columns, std::span<double> x, std::span<const double> bias);
/// bias_gradient[columns] += sum over rows of gradient.
void bias_gradient(std::int64_t rows, std::int64_t columns, std::span<const double> gradient,
                   std::span<double> bias_gradient);

/// The tanh form of GELU, and its derivative, at one point.
double gelu(double x);
double gelu_derivative(double x);
/// y = gelu(x).
void gelu_forward(std::span<const double> x, std::span<double> y);
/// dx = dy * gelu'(x); in place on dy is allowed.
void gelu_backward(std::span<const double> x, std::span<const double> dy, std::span<double> dx);

/// y = x * factors, where factors are 0 for dropped elements and 1 / (1 - probability) for kept ones;
/// backward is the same call on the gradient.
void dropout(std::span<const double> factors, std::span<const double> x, std::span<double> y);

}  // namespace tranche::kernels::reference
