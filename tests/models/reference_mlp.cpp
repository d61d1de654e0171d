#include <string>

#include "kernels/reference/cross_entropy.h"
#include "reference_models.h"

namespace tranche::reference_training {

LossSum mlp(const models::MlpConfig& config, const Tensors& weights, std::span<const float> inputs,
            std::span<const float> values, std::span<const std::int32_t> labels, Tensors* gradients) {
  const std::size_t layers = config.widths.size() - 1;
  const std::int64_t in = config.widths.front(), out = config.widths.back();
  const std::int64_t rows = static_cast<std::int64_t>(inputs.size()) / in;
  const auto name = [](std::size_t layer, const char* what) {
    return "layer." + std::to_string(layer) + what;
  };

  std::vector<Tensor> entries(layers), sums(layers);
  entries[0].assign(inputs.begin(), inputs.end());
  for (std::size_t i = 0; i < layers; ++i) {
    linear(rows, entries[i], weights.at(name(i, ".weight")), weights.at(name(i, ".bias")), sums[i]);
    if (i + 1 < layers) gelu(sums[i], entries[i + 1]);
  }
  const Tensor& y = sums.back();
  Tensor gradient(y.size());
  LossSum loss;
  if (config.loss == models::MlpLoss::cross_entropy) {
    const auto result = kernels::reference::cross_entropy_forward(out, y, labels);
    loss = {result.loss_sum, result.tokens};
    kernels::reference::cross_entropy_backward(out, y, labels, 1.0, gradient);
  } else {
    loss.tokens = rows;
    for (std::size_t i = 0; i < y.size(); ++i) {
      const double difference = y[i] - values[i];
      loss.sum += difference * difference / static_cast<double>(out);
      gradient[i] = 2 * difference / static_cast<double>(out);
    }
  }
  for (std::size_t i = layers; gradients != nullptr && i-- > 0;) {
    Tensor next;
    linear_backward(rows, entries[i], weights.at(name(i, ".weight")), gradient,
                    gradients->at(name(i, ".weight")), gradients->at(name(i, ".bias")), &next);
    if (i > 0) gelu_backward(sums[i - 1], next);
    gradient = std::move(next);
  }
  return loss;
}

}  // namespace tranche::reference_training
