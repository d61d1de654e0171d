#include "kernels/reference/swiglu.h"

#include <cmath>
#include <cstddef>

namespace tranche::kernels::reference {

double silu(double x) {
  return x / (1 + std::exp(-x));
}

double silu_derivative(double x) {
  const double s = 1 / (1 + std::exp(-x));
  return s + x * s * (1 - s);
}

void swiglu_forward(std::span<const double> gate, std::span<const double> up, std::span<double> out) {
  for (std::size_t i = 0; i < gate.size(); ++i) out[i] = silu(gate[i]) * up[i];
}

void swiglu_backward(std::span<const double> gate, std::span<const double> up, std::span<const double> d_out,
                     std::span<double> d_gate, std::span<double> d_up) {
  for (std::size_t i = 0; i < gate.size(); ++i) {
    d_gate[i] = d_out[i] * up[i] * silu_derivative(gate[i]);
    d_up[i] = d_out[i] * silu(gate[i]);
  }
}

}  // namespace tranche::kernels::reference
