#include "models/mlp.h"

#include <fmt/core.h>

#include <cmath>
#include <string>
#include <utility>

#include "tranche/core/error.h"
#include "tranche/engine/engine.h"
#include "tranche/kernels/cross_entropy.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/squared_error.h"
#include "tranche/models/linear.h"
#include "tranche/models/step_tensors.h"

namespace tranche::models {

namespace {

enum Parameter : int { weight, bias };

void validate(const MlpConfig& config) {
  if (config.widths.size() < 2) {
    throw ConfigurationError(
        fmt::format("an MLP needs an input and an output width, but {} were given", config.widths.size()));
  }
  for (std::size_t i = 0; i < config.widths.size(); ++i) {
    if (config.widths[i] < 1) {
      throw ConfigurationError(
          fmt::format("width {} of the MLP is {}, but must be positive", i, config.widths[i]));
    }
  }
}

void require_batch(const MlpConfig& config, const ConstTensorView& inputs, const ConstTensorView& targets,
                   DataType compute) {
  const std::int64_t in = config.widths.front(), out = config.widths.back();
  if (inputs.shape.rank() != 2 || inputs.shape[1] != in ||
      (inputs.dtype != DataType::float32 && inputs.dtype != compute)) {
    throw InvalidArgument(fmt::format("inputs must be fp32 [batch, {}] (or the compute dtype {}), not {} {}",
                                      in, name_of(compute), name_of(inputs.dtype), inputs.shape.to_string()));
  }
  const std::int64_t batch = inputs.shape[0];
  const bool classes = config.loss == MlpLoss::cross_entropy;
  const Shape wanted = classes ? Shape{batch} : Shape{batch, out};
  const DataType dtype = classes ? DataType::int32 : DataType::float32;
  if (!(targets.shape == wanted) || targets.dtype != dtype) {
    throw InvalidArgument(fmt::format("targets must be {} {}, not {} {}", name_of(dtype), wanted.to_string(),
                                      name_of(targets.dtype), targets.shape.to_string()));
  }
}

/// The loss of outputs y (fp32); in training its gradient overwrites y.
void loss_and_gradient(Engine& engine, MlpLoss loss, const TensorView& y, const ConstTensorView& targets,
                       const StepTensors& totals, bool training) {
  Stream& stream = engine.compute_stream();
  const float scale = training ? engine.loss_gradient_scale() : 0;
  if (loss == MlpLoss::squared_error) {
    kernels::squared_error(stream, y, targets, totals[0], totals[1]);
    if (training) kernels::squared_error_gradient(stream, y, targets, scale, y);
    return;
  }
  const Shape rows{y.shape[0]};
  const StepTensors statistics(
      engine, Category::activations, "cross-entropy statistics",
      {{DataType::float32, rows}, {DataType::float32, rows}, {DataType::float32, rows}});
  const kernels::CrossEntropyState state{statistics[0], statistics[1], statistics[2]};
  kernels::cross_entropy_begin(stream, state);
  kernels::cross_entropy_accumulate(stream, y, targets, 0, state);
  kernels::cross_entropy_finish(stream, targets, state, totals[0], totals[1]);
  if (training) kernels::cross_entropy_gradient(stream, y, targets, 0, state, scale, y);
}

}  // namespace

Mlp::Mlp(MlpConfig config) : config_(std::move(config)) {
  validate(config_);
}

ModelSpec Mlp::spec(const MlpConfig& config) {
  validate(config);
  ModelSpec spec;
  for (std::size_t i = 0; i + 1 < config.widths.size(); ++i) {
    const std::int64_t in = config.widths[i], out = config.widths[i + 1];
    const std::string name = "layer." + std::to_string(i);
    const auto normal = Initializer::normal(1.0f / std::sqrt(static_cast<float>(in)));
    spec.add_unit({.name = name,
                   .tensors = {{name + ".weight", {in, out}, normal, {}, LinearLayout::in_out},
                               {name + ".bias", {out}, Initializer::zeros()}}});
    spec.flops_per_token += 6.0 * static_cast<double>(in) * static_cast<double>(out);
  }
  spec.gathers_per_micro_batch = [units = spec.units().size()](const Config&) {
    return std::vector<int>(units, 2);
  };
  return spec;
}

void Mlp::forward_backward(Engine& engine, const ConstTensorView& inputs,
                           const ConstTensorView& targets) const {
  run(engine, inputs, targets, true);
}

void Mlp::evaluate(Engine& engine, const ConstTensorView& inputs, const ConstTensorView& targets) const {
  run(engine, inputs, targets, false);
}

void Mlp::run(Engine& engine, const ConstTensorView& inputs, const ConstTensorView& targets,
              bool training) const {
  const DataType dtype = engine.config().precision.compute;
  require_batch(config_, inputs, targets, dtype);
  Stream& stream = engine.compute_stream();
  const std::int64_t batch = inputs.shape[0];
  const int layers = narrow<int>(config_.widths.size()) - 1;
  const auto acquire = [&](DataType type, std::int64_t columns, std::string_view tag) {
    return StepTensors(engine, Category::activations, tag, {{type, {batch, columns}}});
  };

  engine.begin_micro_batch();
  StepTensors totals(engine, Category::activations, "loss and samples",
                     {{DataType::float64, {}}, {DataType::int64, {}}});
  kernels::fill_zero(stream, totals[0]);
  kernels::fill_zero(stream, totals[1]);

  // sums[i] is layer i's linear output, entries[i] the input of layer i: the inputs, then GELU of the sums.
  std::vector<StepTensors> sums(static_cast<std::size_t>(layers)), entries(static_cast<std::size_t>(layers));
  ConstTensorView input = inputs;
  if (inputs.dtype != dtype) {
    entries[0] = acquire(dtype, config_.widths[0], "inputs");
    kernels::cast(stream, inputs, entries[0][0]);
    input = entries[0][0];
  }
  const auto entry = [&](int layer) -> ConstTensorView {
    return layer == 0 ? input : entries[static_cast<std::size_t>(layer)][0];
  };
  for (int layer = 0; layer < layers; ++layer) {
    const auto i = static_cast<std::size_t>(layer);
    sums[i] = acquire(dtype, config_.widths[i + 1], "layer output");
    linear_forward(engine, engine.gather({layer}), {weight, bias}, entry(layer), sums[i][0]);
    if (layer + 1 < layers) {
      entries[i + 1] = acquire(dtype, config_.widths[i + 1], "layer input");
      kernels::gelu_forward(stream, sums[i][0], entries[i + 1][0]);
      if (!training) sums[i].release();
    }
    if (!training) entries[i].release();
  }

  StepTensors gradient = std::move(sums.back());
  {
    StepTensors widened;
    if (dtype != DataType::float32) {
      widened = acquire(DataType::float32, config_.widths.back(), "outputs in fp32");
      kernels::cast(stream, gradient[0], widened[0]);
    }
    const TensorView outputs = widened.held() ? widened[0] : gradient[0];
    loss_and_gradient(engine, config_.loss, outputs, targets, totals, training);
    if (training && widened.held()) kernels::cast(stream, outputs, gradient[0]);
  }
  for (int layer = layers - 1; training && layer >= 0; --layer) {
    const auto i = static_cast<std::size_t>(layer);
    const GatheredUnit unit = engine.gather({layer});
    UnitGradients gradients = engine.gradients({layer});
    StepTensors next;
    if (layer > 0) next = acquire(dtype, config_.widths[i], "layer gradient");
    linear_backward(engine, unit, gradients, {weight, bias}, entry(layer), gradient[0],
                    layer > 0 ? &next[0] : nullptr);
    std::move(gradients).reduce();
    if (layer > 0) {
      kernels::gelu_backward(stream, sums[i - 1][0], next[0], next[0]);
      sums[i - 1].release();
    }
    entries[i].release();
    gradient = std::move(next);
  }
  gradient.release();
  engine.end_micro_batch(totals[0], totals[1]);
}

}  // namespace tranche::models
