#include "reference_training.h"

#include <cmath>
#include <numbers>

#include "kernels/reference/matmul.h"

namespace tranche::reference_training {

namespace {
const double gelu_factor = std::sqrt(2.0 / std::numbers::pi);
constexpr double gelu_cubic = 0.044715;

bool decays(const std::string& name) {
  return name.ends_with(".weight") && name.find("ln_") == std::string::npos &&
         name.find("norm") == std::string::npos;
}
}  // namespace

Tensors zeros(const Tensors& like) {
  Tensors result;
  for (const auto& [name, values] : like) result[name].assign(values.size(), 0.0);
  return result;
}

void gelu(const Tensor& x, Tensor& y) {
  y.resize(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    y[i] = 0.5 * x[i] * (1 + std::tanh(gelu_factor * (x[i] + gelu_cubic * x[i] * x[i] * x[i])));
  }
}

void gelu_backward(const Tensor& x, Tensor& gradient) {
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double t = std::tanh(gelu_factor * (x[i] + gelu_cubic * x[i] * x[i] * x[i]));
    const double slope = gelu_factor * (1 + 3 * gelu_cubic * x[i] * x[i]);
    gradient[i] *= 0.5 * (1 + t) + 0.5 * x[i] * (1 - t * t) * slope;
  }
}

void linear(std::int64_t rows, const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor& out) {
  const auto columns = static_cast<std::int64_t>(bias.size());
  const auto inner = static_cast<std::int64_t>(weight.size()) / columns;
  out.resize(static_cast<std::size_t>(rows * columns));
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = bias[i % bias.size()];
  kernels::reference::matmul({.m = rows, .n = columns, .k = inner}, x, weight, true, out);
}

void linear_backward(std::int64_t rows, const Tensor& x, const Tensor& weight, const Tensor& d_out,
                     Tensor& d_weight, Tensor& d_bias, Tensor* d_x) {
  const auto columns = static_cast<std::int64_t>(d_bias.size());
  const auto inner = static_cast<std::int64_t>(weight.size()) / columns;
  kernels::reference::matmul({.m = inner, .n = columns, .k = rows, .transpose_a = true}, x, d_out, true,
                             d_weight);
  for (std::size_t i = 0; i < d_out.size(); ++i) d_bias[i % d_bias.size()] += d_out[i];
  if (d_x == nullptr) return;
  d_x->resize(static_cast<std::size_t>(rows * inner));
  kernels::reference::matmul({.m = rows, .n = inner, .k = columns, .transpose_b = true}, d_out, weight, false,
                             *d_x);
}

double Optimizer::update(Tensors& weights, const Tensors& gradient_sums, std::int64_t tokens) {
  if (steps_++ == 0) first_ = second_ = zeros(weights);
  double squares = 0;
  for (const auto& [name, values] : gradient_sums) {
    for (const double value : values) squares += value * value;
  }
  const auto divisor = static_cast<double>(tokens);
  const double norm = std::sqrt(squares) / divisor;
  const double clip = options_.clipping > 0 && norm > options_.clipping ? options_.clipping / norm : 1.0;
  for (auto& [name, w] : weights) {
    const Tensor& sums = gradient_sums.at(name);
    Tensor &m = first_.at(name), &v = second_.at(name);
    const double decay = decays(name) ? options_.weight_decay : 0;
    for (std::size_t i = 0; i < w.size(); ++i) {
      const double g = sums[i] / divisor * clip;
      if (!options_.adam) {
        m[i] = options_.momentum * m[i] + g + decay * w[i];
        w[i] -= options_.learning_rate * m[i];
        continue;
      }
      w[i] -= options_.learning_rate * decay * w[i];
      m[i] = options_.beta1 * m[i] + (1 - options_.beta1) * g;
      v[i] = options_.beta2 * v[i] + (1 - options_.beta2) * g * g;
      const double m_hat = m[i] / (1 - std::pow(options_.beta1, steps_));
      const double v_hat = v[i] / (1 - std::pow(options_.beta2, steps_));
      w[i] -= options_.learning_rate * m_hat / (std::sqrt(v_hat) + options_.epsilon);
    }
  }
  return norm;
}

}  // namespace tranche::reference_training
