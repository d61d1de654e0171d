#pragma once
/// Training in fp64 in one process, on named vectors, with which the engine is compared. It shares no code
/// with the engine except kernels/reference, which is itself tested against finite differences.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tranche::reference_training {

using Tensor = std::vector<double>;
using Tensors = std::map<std::string, Tensor>;

struct LossSum {
  double sum = 0;
  std::int64_t tokens = 0;
};

/// Zeros with the shapes of `like`.
Tensors zeros(const Tensors& like);

/// y = gelu(x) in its tanh form. The second function turns dy into dx.
void gelu(const Tensor& x, Tensor& y);
void gelu_backward(const Tensor& x, Tensor& gradient);
/// out = x W + b for x [rows, inner] and W [inner, columns].
void linear(std::int64_t rows, const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor& out);
/// Adds to the gradients of weight and bias; d_x (if not null) = d_out W^T.
void linear_backward(std::int64_t rows, const Tensor& x, const Tensor& weight, const Tensor& d_out,
                     Tensor& d_weight, Tensor& d_bias, Tensor* d_x);

struct OptimizerOptions {
  bool adam = true;  ///< AdamW; false: SGD with momentum
  double learning_rate = 1e-3;
  double beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, weight_decay = 0;
  double momentum = 0;
  double clipping = 0;  ///< limit of the global norm; 0: off
};

/// Holds the optimizer state. Only tensors whose names end in ".weight" and are not a norm's decay.
class Optimizer {
 public:
  explicit Optimizer(const OptimizerOptions& options) : options_(options) {}
  /// Runs one update with gradient sums over `tokens` tokens; returns the norm of the mean gradient.
  double update(Tensors& weights, const Tensors& gradient_sums, std::int64_t tokens);

 private:
  OptimizerOptions options_;
  Tensors first_, second_;
  int steps_ = 0;
};

}  // namespace tranche::reference_training
