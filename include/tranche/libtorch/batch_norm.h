#pragma once
/// Batch norm with statistics over the micro-batches of all ranks.

#include <torch/torch.h>

#include <cstdint>
#include <vector>

#include "tranche/engine/runtime.h"

namespace tranche::libtorch {

namespace detail {

/// Collective. Sums of `values` (fp64, on any device) over all ranks.
inline at::Tensor sum_over_ranks(Runtime& runtime, const at::Tensor& values) {
  const at::Tensor mine = values.to(at::kCPU, at::kDouble).contiguous().clone();
  runtime.all()
      .all_reduce(mine.data_ptr(), mine.numel(), DataType::float64, ReduceOperation::sum,
                  OperationLabel{"batch norm", "statistics", Traffic::control, Tier::host})
      .wait();
  return mine.to(values.device());
}

/// y = (x - mean) / sqrt(variance + epsilon) weight + bias, by channel (dimension 1). Returns y, the mean,
/// the variance and the number of values behind them.
struct SynchronizedNorm : torch::autograd::Function<SynchronizedNorm> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const at::Tensor& x, const at::Tensor& weight,
                                                const at::Tensor& bias, Runtime* runtime, double epsilon) {
    const auto dims = all_but_channels(x);
    const std::int64_t channels = x.size(1);
    const at::Tensor wide = x.to(at::kDouble);
    const at::Tensor count = at::full({1}, double(x.numel() / channels), wide.options());
    const at::Tensor sums =
        sum_over_ranks(*runtime, at::cat({wide.sum(dims), (wide * wide).sum(dims), count}));
    const at::Tensor total = sums[2 * channels];
    const at::Tensor mean = sums.slice(0, 0, channels) / total;
    const at::Tensor variance = (sums.slice(0, channels, 2 * channels) / total - mean * mean).clamp_min(0);
    const at::Tensor scale = (variance + epsilon).rsqrt();
    const at::Tensor normed = ((wide - by_channel(mean, x)) * by_channel(scale, x)).to(at::kFloat);
    context->saved_data["runtime"] = reinterpret_cast<std::int64_t>(runtime);
    context->save_for_backward({normed, weight, scale, total});
    const at::Tensor y = normed * by_channel(weight.to(at::kFloat), x) + by_channel(bias.to(at::kFloat), x);
    torch::autograd::variable_list outputs{y.to(x.scalar_type()), mean, variance, total};
    context->mark_non_differentiable({outputs[1], outputs[2], outputs[3]});
    return outputs;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    auto& runtime = *reinterpret_cast<Runtime*>(context->saved_data["runtime"].toInt());
    const auto saved = context->get_saved_variables();
    const at::Tensor &normed = saved[0], &weight = saved[1], &scale = saved[2], &total = saved[3];
    const at::Tensor gradient = gradients[0].to(at::kFloat);
    const auto dims = all_but_channels(normed);
    const std::int64_t channels = normed.size(1);
    const at::Tensor of_bias = gradient.to(at::kDouble).sum(dims);
    const at::Tensor of_weight = (gradient * normed).to(at::kDouble).sum(dims);
    const at::Tensor means = sum_over_ranks(runtime, at::cat({of_bias, of_weight})) / total;
    const at::Tensor of_x =
        (gradient - by_channel(means.slice(0, 0, channels), normed).to(at::kFloat) -
         normed * by_channel(means.slice(0, channels, 2 * channels), normed).to(at::kFloat)) *
        by_channel(weight.to(at::kDouble) * scale, normed).to(at::kFloat);
    return {of_x.to(gradients[0].scalar_type()), of_weight.to(weight.scalar_type()),
            of_bias.to(weight.scalar_type()), at::Tensor(), at::Tensor()};
  }

 private:
  static std::vector<std::int64_t> all_but_channels(const at::Tensor& x) {
    std::vector<std::int64_t> dims{0};
    for (std::int64_t d = 2; d < x.dim(); ++d) dims.push_back(d);
    return dims;
  }
  static at::Tensor by_channel(const at::Tensor& values, const at::Tensor& x) {
    std::vector<std::int64_t> shape(static_cast<std::size_t>(x.dim()), 1);
    shape[1] = x.size(1);
    return values.view(shape);
  }
};

}  // namespace detail

/// torch::nn::BatchNorm with mean and variance over the micro-batches of all ranks (along dimension 1 of any
/// input), added up in fp64. Parameters and buffers have torch's names. In training mode forward() and its
/// backward are collective over runtime.all(), so they belong inside a Trainer's step.
class SynchronizedBatchNormImpl : public torch::nn::Module {
 public:
  SynchronizedBatchNormImpl(Runtime& runtime, std::int64_t features, double epsilon = 1e-5,
                            double momentum = 0.1)
      : runtime_(runtime), epsilon_(epsilon), momentum_(momentum) {
    weight = register_parameter("weight", torch::ones({features}));
    bias = register_parameter("bias", torch::zeros({features}));
    running_mean = register_buffer("running_mean", torch::zeros({features}));
    running_var = register_buffer("running_var", torch::ones({features}));
    num_batches_tracked = register_buffer("num_batches_tracked", torch::zeros({}, torch::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (!is_training()) {
      return at::batch_norm(x, weight, bias, running_mean, running_var, false, momentum_, epsilon_, false);
    }
    const auto found = detail::SynchronizedNorm::apply(x, weight, bias, &runtime_, epsilon_);
    const at::NoGradGuard no_grad;
    running_mean.lerp_(found[1].to(running_mean.scalar_type()), momentum_);
    const at::Tensor unbiased = found[2] * (found[3] / (found[3] - 1).clamp_min(1));
    running_var.lerp_(unbiased.to(running_var.scalar_type()), momentum_);
    num_batches_tracked += 1;
    return found[0];
  }
  at::Tensor weight, bias, running_mean, running_var, num_batches_tracked;

 private:
  Runtime& runtime_;
  double epsilon_, momentum_;
};
TORCH_MODULE(SynchronizedBatchNorm);

}  // namespace tranche::libtorch
