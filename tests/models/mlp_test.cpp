// Compares the MLP with fp64 and between ranks and stages, with both losses.
#include "models/mlp.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "training_fixture.h"
#include "tranche/device/device.h"

namespace tranche::models {
namespace {

using reference_training::Tensors;
using ::testing::HasSubstr;

constexpr std::int64_t batch_size = 12;

/// Samples of a function that an MLP can learn; sample s is the same for every caller.
struct RowData {
  std::vector<float> inputs, values;
  std::vector<std::int32_t> labels;

  RowData(const MlpConfig& config, std::int64_t first, std::int64_t count) {
    const std::int64_t in = config.widths.front(), out = config.widths.back();
    for (std::int64_t s = first; s < first + count; ++s) {
      float sum = 0;
      for (std::int64_t c = 0; c < in; ++c) {
        inputs.push_back(random_normal({.seed = 11, .subject = static_cast<std::uint64_t>(s)},
                                       static_cast<std::uint64_t>(c)));
        sum += inputs.back();
      }
      for (std::int64_t c = 0; c < out; ++c) values.push_back(std::sin(sum + static_cast<float>(c)));
      labels.push_back(s % 5 == 4 ? -100 : static_cast<std::int32_t>(sum > 0 ? 0 : out - 1));
    }
  }
  ConstTensorView input_view(const MlpConfig& config) const {
    const std::int64_t in = config.widths.front();
    return {inputs.data(), DataType::float32, {static_cast<std::int64_t>(inputs.size()) / in, in}};
  }
  ConstTensorView target_view(const MlpConfig& config) const {
    const auto rows = static_cast<std::int64_t>(labels.size());
    if (config.loss == MlpLoss::cross_entropy) return {labels.data(), DataType::int32, {rows}};
    return {values.data(), DataType::float32, {rows, config.widths.back()}};
  }
};

struct Run {
  std::vector<double> losses;
  Tensors weights;
  kernels::Digest digest;
};

Config mlp_config(int ranks, std::int64_t accumulation, const char* optimizer) {
  auto config = plain_config(batch_size, ranks);
  config.accumulation_steps = accumulation;
  config.micro_batch_size = batch_size / ranks / accumulation;
  config.optimizer.type = optimizer;
  config.optimizer.learning_rate = optimizer == std::string("SGD") ? 0.05 : 3e-3;
  if (config.optimizer.type == "SGD") config.optimizer.parameters["momentum"] = 0.9;
  config.gradient_clipping = 1.0;
  return config;
}

Run train(int ranks, const MlpConfig& model, const Config& config, int steps) {
  Run run;
  on_ranks(ranks, Mlp::spec(model), config, [&](Engine& engine) {
    const Mlp mlp(model);
    const int rank = engine.runtime().rank();
    std::vector<double> losses;
    for (int step = 0; step < steps; ++step) {
      for (std::int64_t m = 0; m < config.accumulation_steps; ++m) {
        const RowData data(model, step * batch_size + (m * ranks + rank) * config.micro_batch_size,
                           config.micro_batch_size);
        mlp.forward_backward(engine, data.input_view(model), data.target_view(model));
      }
      losses.push_back(engine.step().loss);
    }
    auto weights = read_all(engine);
    const auto digest = engine.weights_digest();
    if (rank == 0) run = {std::move(losses), std::move(weights), digest};
  });
  return run;
}

std::vector<double> reference_losses(const MlpConfig& model, const Config& config, int steps) {
  Tensors weights;
  on_ranks(1, Mlp::spec(model), config, [&](Engine& engine) { weights = read_all(engine); });
  reference_training::Optimizer optimizer(reference_optimizer(config));
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    const RowData data(model, step * batch_size, batch_size);
    auto gradients = reference_training::zeros(weights);
    const auto loss =
        reference_training::mlp(model, weights, data.inputs, data.values, data.labels, &gradients);
    losses.push_back(loss.sum / static_cast<double>(loss.tokens));
    (void)optimizer.update(weights, gradients, loss.tokens);
  }
  return losses;
}

void expect_near(const std::vector<double>& actual, const std::vector<double>& wanted, double tolerance) {
  ASSERT_EQ(actual.size(), wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_NEAR(actual[i], wanted[i], tolerance * std::abs(wanted[i])) << "step " << i;
  }
}

const MlpConfig regression{{5, 31, 17, 3}, MlpLoss::squared_error};
const MlpConfig classification{{7, 29, 4}, MlpLoss::cross_entropy};

TEST(ReferenceMlp, BackwardAgreesWithFiniteDifferences) {
  for (const MlpConfig& model : {regression, classification}) {
    Tensors weights;
    const ModelSpec spec = Mlp::spec(model);
    EXPECT_FALSE(spec.recomputes_activations);
    for (const auto& unit : spec.units()) {
      for (const auto& tensor : unit.tensors) {
        for (std::int64_t i = 0; i < tensor.shape.elements(); ++i) {
          weights[tensor.name].push_back(
              0.5 * random_normal({.seed = weights.size()}, static_cast<std::uint64_t>(i)));
        }
      }
    }
    const RowData data(model, 0, 6);
    auto gradients = reference_training::zeros(weights);
    (void)reference_training::mlp(model, weights, data.inputs, data.values, data.labels, &gradients);
    for (auto& [name, values] : weights) {
      for (std::size_t i = 0; i < values.size(); i += 3) {
        const double kept = values[i], h = 1e-5;
        values[i] = kept + h;
        const double above =
            reference_training::mlp(model, weights, data.inputs, data.values, data.labels, nullptr).sum;
        values[i] = kept - h;
        const double below =
            reference_training::mlp(model, weights, data.inputs, data.values, data.labels, nullptr).sum;
        values[i] = kept;
        EXPECT_NEAR(gradients[name][i], (above - below) / (2 * h), 1e-7) << name << " element " << i;
      }
    }
  }
}

TEST(Mlp, FiftyStepsInFp32AgreeWithFp64) {
  for (const MlpConfig& model : {regression, classification}) {
    for (const char* optimizer : {"AdamW", "SGD"}) {
      const Config config = mlp_config(1, 1, optimizer);
      const auto run = train(1, model, config, 50);
      expect_near(run.losses, reference_losses(model, config, 50), 1e-5);
    }
  }
}

TEST(Mlp, SixteenBitLossesStayWithinTheirBoundOfFp64) {
  auto config = mlp_config(1, 1, "AdamW");
  const auto wanted = reference_losses(regression, config, 20);
  for (const auto& [dtype, bound] : {std::pair{DataType::bfloat16, 0.03}, {DataType::float16, 0.005}}) {
    config.precision.compute = dtype;
    config.loss_scaling = dtype == DataType::float16;
    // Outputs are rounded to 2^-9 (bf16) or 2^-12 (fp16) of their size, and the errors of the fit are
    // squared.
    expect_near(train(1, regression, config, 20).losses, wanted, bound);
  }
}

TEST(Mlp, RanksWithAPartOfTheBatchAgreeWithOneRank) {
  for (const MlpConfig& model : {regression, classification}) {
    for (const char* optimizer : {"AdamW", "SGD"}) {
      const auto one = train(1, model, mlp_config(1, 1, optimizer), 30);
      for (const int ranks : {2, 3}) {
        auto config = mlp_config(ranks, 2, optimizer);
        config.stage = 3;
        const auto run = train(ranks, model, config, 30);
        expect_near(run.losses, one.losses, 1e-5);
        for (const auto& [name, values] : one.weights) {
          EXPECT_LE(relative_distance(run.weights.at(name), values),
                    optimizer == std::string("SGD") ? 1e-5 : 1e-4)
              << name << " " << optimizer << " ranks " << ranks;
        }
      }
    }
  }
}

TEST(Mlp, StagesGiveTheSameBits) {
  auto config = mlp_config(3, 2, "AdamW");
  config.reduction = ReductionPolicy::micro_batch;
  const auto wanted = train(3, regression, config, 5);
  for (const int stage : {1, 2, 3}) {
    config.stage = stage;
    const auto run = train(3, regression, config, 5);
    EXPECT_EQ(run.digest, wanted.digest) << "stage " << stage;
    EXPECT_EQ(run.losses, wanted.losses) << "stage " << stage;
  }
}

TEST(Mlp, EvaluationAgreesWithTheReference) {
  for (const MlpConfig& model : {regression, classification, MlpConfig{{4, 2}, MlpLoss::squared_error}}) {
    on_ranks(1, Mlp::spec(model), mlp_config(1, 1, "AdamW"), [&](Engine& engine) {
      const RowData data(model, 3, 7);
      engine.begin_evaluation();
      Mlp(model).evaluate(engine, data.input_view(model), data.target_view(model));
      const auto result = engine.end_evaluation();
      const auto wanted =
          reference_training::mlp(model, read_all(engine), data.inputs, data.values, data.labels, nullptr);
      EXPECT_EQ(result.tokens, wanted.tokens);
      EXPECT_NEAR(result.loss, wanted.sum / static_cast<double>(wanted.tokens), 1e-6);
    });
  }
}

TEST(Mlp, RefusesWhatDoesNotFit) {
  const auto text = [](const auto& action) -> std::string {
    try {
      action();
    } catch (const Error& error) {
      return error.message();
    }
    return "accepted";
  };
  EXPECT_THAT(text([] { (void)Mlp::spec({{3}}); }),
              HasSubstr("needs an input and an output width, but 1 were"));
  EXPECT_THAT(text([] { Mlp({{3, 0, 2}}); }), HasSubstr("width 1 of the MLP is 0"));
  on_ranks(1, Mlp::spec(regression), mlp_config(1, 1, "AdamW"), [&](Engine& engine) {
    const Mlp mlp(regression);
    const ConstTensorView inputs{nullptr, DataType::float32, {2, 5}},
        narrow{nullptr, DataType::float32, {2, 4}};
    const ConstTensorView labels{nullptr, DataType::int32, {2}};
    EXPECT_THAT(text([&] { mlp.forward_backward(engine, narrow, labels); }),
                HasSubstr("inputs must be fp32 [batch, 5] (or the compute dtype fp32), not fp32 [2, 4]"));
    EXPECT_THAT(text([&] { mlp.forward_backward(engine, inputs, labels); }),
                HasSubstr("targets must be fp32 [2, 3], not int32 [2]"));
  });
}

}  // namespace
}  // namespace tranche::models
