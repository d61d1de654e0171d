#pragma once
/// Training in fp64 in one process, on named vectors: what the engine is measured against. Shares no code
/// with it beyond kernels/reference, which is itself tested against finite differences.

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

/// Zeros of the shapes of `like`.
Tensors zeros(const Tensors& like);

/// y = gelu(x) in its tanh form; dy becomes dx.
void gelu(const Tensor& x, Tensor& y);
void gelu_backward(const Tensor& x, Tensor& gradient);
/// out = x W + b for x [rows, inner] and W [inner, columns].
void linear(std::int64_t rows, const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor& out);
/// Adds to the gradients of weight and bias; d_x (when given) = d_out W^T.
void linear_backward(std::int64_t rows, const Tensor& x, const Tensor& weight, const Tensor& d_out,
                     Tensor& d_weight, Tensor& d_bias, Tensor* d_x);

struct OptimizerOptions {
  bool adam = true;  ///< AdamW; false: SGD with momentum
  double learning_rate = 1e-3;
  double beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, weight_decay = 0;
  double momentum = 0;
  double clipping = 0;  ///< global norm; 0: off
};

/// Keeps the state; decays only tensors whose name ends in ".weight" and is not a norm's.
class Optimizer {
 public:
  explicit Optimizer(const OptimizerOptions& options) : options_(options) {}
  /// One update with gradient sums of `tokens` tokens; returns the norm of the mean gradient.
  double update(Tensors& weights, const Tensors& gradient_sums, std::int64_t tokens);

 private:
  OptimizerOptions options_;
  Tensors first_, second_;
  int steps_ = 0;
};

}  // namespace tranche::reference_training
