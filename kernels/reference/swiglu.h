#pragma once
/// Plain fp64 statement of kernels/swiglu.h, single-threaded. For tests and the fp64 reference trainer.

#include <span>

namespace tranche::kernels::reference {

/// x / (1 + exp(-x)), and its derivative, at one point.
double silu(double x);
double silu_derivative(double x);
/// out = silu(gate) * up.
void swiglu_forward(std::span<const double> gate, std::span<const double> up, std::span<double> out);
/// d_gate = d_out * up * silu'(gate), d_up = d_out * silu(gate).
void swiglu_backward(std::span<const double> gate, std::span<const double> up, std::span<const double> d_out,
                     std::span<double> d_gate, std::span<double> d_up);

}  // namespace tranche::kernels::reference
