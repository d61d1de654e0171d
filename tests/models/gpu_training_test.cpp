// Language models on the GPU (or the emulated one): compared with the CPU and between stages, and the number
// of host waits in a step.
#include <gtest/gtest.h>

#include <memory>

#include "device/cuda_probe.h"
#include "tests/core/rounds.h"
#include "tiny_llama.h"
#include "training_fixture.h"
#include "tranche/models/llama.h"

namespace tranche::models {
namespace {

constexpr std::int64_t time_steps = 11;

class GpuTraining : public ::testing::Test {
 protected:
  void SetUp() override {
    const detail::CudaProbe probe = detail::probe_cuda();
    if (probe.devices.empty()) GTEST_SKIP() << probe.problem;
  }
};

Config gpu_config(int ranks, const char* optimizer) {
  Config config = plain_config(4, ranks);
  config.gradient_clipping = 0.5;
  config.optimizer.type = optimizer;
  config.optimizer.learning_rate = config.optimizer.type == "SGD" ? 0.1 : 2e-3;
  if (config.optimizer.type == "SGD") config.optimizer.parameters["momentum"] = 0.9;
  return config;
}

double distance(const reference_training::Tensors& got, const reference_training::Tensors& wanted) {
  double worst = 0;
  for (const auto& [name, values] : wanted) {
    auto a = got.at(name), b = values;
    if (name.ends_with("c_attn.bias")) {
      // The gradient of the key bias is only rounding noise (see gpt_training_test.cpp).
      const auto third = static_cast<std::ptrdiff_t>(b.size() / 3);
      a.erase(a.begin() + third, a.begin() + 2 * third);
      b.erase(b.begin() + third, b.begin() + 2 * third);
    }
    worst = std::max(worst, relative_distance(a, b));
  }
  return worst;
}

TEST_F(GpuTraining, TwentyStepsInFp32AgreeWithTheCpu) {
  for (const char* optimizer : {"SGD", "AdamW"}) {
    const Config config = gpu_config(1, optimizer);
    reference_training::Tensors start;
    on_ranks(1, Gpt::spec(tiny_gpt(), time_steps), config, [&](Engine& engine) { start = read_all(engine); });
    const auto run = [&](DeviceKind device) {
      return train_gpt(1, tiny_gpt(), config, 20, time_steps, true, device, &start, true);
    };
    const GptRun cpu = run(DeviceKind::cpu), gpu = run(DeviceKind::cuda);
    for (std::size_t step = 0; step < cpu.losses.size(); ++step) {
      EXPECT_NEAR(gpu.losses[step], cpu.losses[step], 1e-5 * cpu.losses[step])
          << optimizer << " step " << step + 1;
    }
    EXPECT_LT(cpu.losses.back(), cpu.losses.front() - 0.2) << "it learns";
    // AdamW divides by the square root of a second moment, which magnifies rounding if gradients are small.
    const double weights = distance(gpu.weights, cpu.weights);
    RecordProperty(std::string(optimizer) + "_weights", std::to_string(weights));
    EXPECT_LE(weights, optimizer == std::string("SGD") ? 1e-5 : 1e-4) << optimizer;
    // Gradients are compared after 19 steps, so they include the difference of the weights as well as that of
    // the kernels.
    EXPECT_LE(distance(gpu.gradients, cpu.gradients), optimizer == std::string("SGD") ? 1e-5 : 1e-4)
        << optimizer;
  }
}

TEST_F(GpuTraining, FirstGradientsInFp32AgreeWithTheCpu) {
  const Config config = gpu_config(1, "SGD");
  reference_training::Tensors start;
  on_ranks(1, Gpt::spec(tiny_gpt(), time_steps), config, [&](Engine& engine) { start = read_all(engine); });
  const auto run = [&](DeviceKind device) {
    return train_gpt(1, tiny_gpt(), config, 1, time_steps, true, device, &start, true).gradients;
  };
  EXPECT_LE(distance(run(DeviceKind::cuda), run(DeviceKind::cpu)), 1e-5);
}

TEST_F(GpuTraining, TheLlamaFamilyAgreesWithTheCpu) {
  for (const LlamaKind kind : all_kinds) {
    const Llama model(tiny_llama(kind));
    const Config config = gpu_config(1, "SGD");
    reference_training::Tensors start;
    on_ranks(1, model.spec(time_steps), config, [&](Engine& engine) { start = read_all(engine); });
    const auto run = [&](int steps, DeviceKind device) {
      return train_model(1, model, config, steps, time_steps, true, device, &start, true);
    };
    EXPECT_LE(distance(run(1, DeviceKind::cuda).gradients, run(1, DeviceKind::cpu).gradients), 1e-5)
        << model.architecture();
    const int steps = test::fewer(4);
    const GptRun cpu = run(steps, DeviceKind::cpu), gpu = run(steps, DeviceKind::cuda);
    for (std::size_t step = 0; step < cpu.losses.size(); ++step) {
      EXPECT_NEAR(gpu.losses[step], cpu.losses[step], 1e-5 * cpu.losses[step])
          << model.architecture() << " step " << step + 1;
    }
  }
}

TEST_F(GpuTraining, TheLlamaFamilysStagesGiveTheSameBits) {
  const Llama model(tiny_llama(LlamaKind::qwen3));
  Config config = gpu_config(2, "AdamW");
  config.precision.compute = config.precision.communication = DataType::bfloat16;
  config.reduction = ReductionPolicy::micro_batch;
  const auto run = [&] { return train_model(2, model, config, 3, time_steps, true, DeviceKind::cuda); };
  const GptRun wanted = run();
  config.stage = 3;
  config.activation_checkpointing = true;
  const GptRun sharded = run();
  EXPECT_EQ(sharded.digest, wanted.digest);
  EXPECT_EQ(sharded.losses, wanted.losses);
}

TEST_F(GpuTraining, AdaptersAgreeWithTheCpuAndOverStages) {
  std::vector<std::unique_ptr<const LanguageModel>> models;
  models.push_back(std::make_unique<Gpt>(tiny_gpt()));
  models.push_back(std::make_unique<Llama>(tiny_llama(LlamaKind::qwen3)));
  for (const auto& model : models) {
    Config config = gpu_config(1, "SGD");
    config.lora = {.rank = 3, .alpha = 7, .dropout = 0.2, .targets = {"all-linear", "lm_head"}};
    reference_training::Tensors start;
    on_ranks(1, model->spec(time_steps), config, [&](Engine& engine) { start = read_all(engine); });
    for (auto& [name, values] : start) {  // so that A has a gradient as well
      if (name.find(".lora_B.") == std::string::npos) continue;
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.02 * static_cast<double>(i % 7) - 0.05;
    }
    const auto run = [&](DeviceKind device) {
      return train_model(1, *model, config, 4, time_steps, true, device, &start);
    };
    const GptRun cpu = run(DeviceKind::cpu), gpu = run(DeviceKind::cuda);
    for (std::size_t step = 0; step < cpu.losses.size(); ++step)
      EXPECT_NEAR(gpu.losses[step], cpu.losses[step], 1e-5 * cpu.losses[step]) << model->architecture();
    EXPECT_LE(distance(gpu.weights, cpu.weights), 1e-5) << model->architecture();
    Config sharded = gpu_config(2, "AdamW");
    sharded.lora = config.lora;
    sharded.reduction = ReductionPolicy::micro_batch;
    sharded.precision.compute = sharded.precision.communication = DataType::bfloat16;
    const auto bits = [&] {
      return train_model(2, *model, sharded, 3, time_steps, true, DeviceKind::cuda).digest;
    };
    const kernels::Digest wanted = bits();
    sharded.stage = 3;
    sharded.activation_checkpointing = true;
    EXPECT_EQ(bits(), wanted) << model->architecture();
  }
}

TEST_F(GpuTraining, StagesAndSettingsGiveTheSameBits) {
  int point = 0;
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    auto config = gpu_config(2, "AdamW");
    config.reduction = ReductionPolicy::micro_batch;
    config.precision.compute = config.precision.communication = dtype;
    const GptRun wanted = train_gpt(2, tiny_gpt(), config, 3, time_steps, false, DeviceKind::cuda);
    for (int stage = 1; stage <= 3; ++stage) {
      config.stage = stage;
      // Saved activations: all, the blocks' inputs, or these in host memory.
      for (const int kept : {0, 1, 2}) {
        if ((kept > 0 && stage < 3) || !test::swept(point++, 3)) continue;
        config.activation_checkpointing = kept > 0;
        config.offload.activations = kept > 1;
        const GptRun run = train_gpt(2, tiny_gpt(), config, 3, time_steps, false, DeviceKind::cuda);
        EXPECT_EQ(run.losses, wanted.losses) << name_of(dtype) << " stage " << stage;
        EXPECT_EQ(run.digest, wanted.digest) << name_of(dtype) << " stage " << stage;
      }
    }
  }
}

TEST_F(GpuTraining, RanksOfContextHaveTheLossesOfOneRankOnTheCpu) {
  GptConfig model = tiny_gpt();
  model.heads = 4;
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = 0.1f;
  const Config one = gpu_config(1, "AdamW");
  const GptRun wanted = train_gpt(1, model, one, 3, 16, true, DeviceKind::cpu);
  for (const ContextExchange exchange : {ContextExchange::gather, ContextExchange::ulysses}) {
    Config config = one;
    config.mesh = "context=2";
    config.context_exchange = exchange;
    const GptRun run = train_gpt(2, model, config, 3, 16, true, DeviceKind::cuda);
    for (std::size_t step = 0; step < wanted.losses.size(); ++step) {
      EXPECT_NEAR(run.losses[step], wanted.losses[step], 1e-5 * wanted.losses[step]) << name_of(exchange);
    }
  }
}

TEST_F(GpuTraining, AStepWaitsForTheDeviceOnceAndReplaysItsUpdates) {
  for (const auto& [ranks, inputs_away] : {std::pair(1, false), std::pair(1, true), std::pair(2, false)}) {
    auto config = gpu_config(ranks, "AdamW");
    config.activation_checkpointing = config.offload.activations = inputs_away;
    config.accumulation_steps = 2;
    config.train_batch_size *= 2;
    config.stage = ranks == 1 ? 0 : 3;
    on_ranks(
        ranks, Gpt::spec(tiny_gpt(), time_steps), config,
        [&](Engine& engine) {
          TokenData data(time_steps, 61, false);
          DeviceBatch device_batch(engine);
          DeviceCounters before;
          // The first step is dynamic; the second records its memory and captures its updates.
          for (int step = 0; step < 5; ++step) {
            if (step == 2) before = engine.device().counters();
            for (int m = 0; m < 2; ++m) {
              data.draw(0, engine.config().micro_batch_size);
              Gpt(tiny_gpt()).forward_backward(engine, device_batch.of(data));
            }
            EXPECT_TRUE(engine.step().applied);
          }
          const DeviceCounters after = engine.device().counters();
          // At most one wait per step; if the device is done before the host asks, there is none.
          EXPECT_LE(after.host_waits - before.host_waits, 3) << ranks << " ranks, 3 steps";
          EXPECT_EQ(after.replays - before.replays,
                    3 * static_cast<std::int64_t>(engine.model().units().size()));
        },
        DeviceKind::cuda);
  }
}

TEST_F(GpuTraining, EvaluationAndTextComeFromTheDevice) {
  const Config config = gpu_config(1, "AdamW");
  double losses[2] = {};
  std::vector<float> logits[2];
  reference_training::Tensors start;
  on_ranks(1, Gpt::spec(tiny_gpt(), time_steps), config, [&](Engine& engine) { start = read_all(engine); });
  for (const DeviceKind device : {DeviceKind::cpu, DeviceKind::cuda}) {
    const int which = device == DeviceKind::cuda ? 1 : 0;
    on_ranks(
        1, Gpt::spec(tiny_gpt(), time_steps), config,
        [&](Engine& engine) {
          for (const auto& [name, values] : start) {
            engine.write_weight(name, std::vector<float>(values.begin(), values.end()));
          }
          TokenData data(time_steps, 61, false);
          DeviceBatch device_batch(engine);
          data.draw(3, 4);
          engine.begin_evaluation();
          Gpt(tiny_gpt()).evaluate(engine, device_batch.of(data));
          losses[which] = engine.end_evaluation().loss;
          const std::vector<std::int32_t> prompt{5, 17, 60};
          logits[which] = Gpt(tiny_gpt()).next_token_logits(engine, prompt);
        },
        device);
  }
  EXPECT_NEAR(losses[1], losses[0], 1e-5 * losses[0]);
  ASSERT_EQ(logits[1].size(), logits[0].size());
  for (std::size_t i = 0; i < logits[0].size(); ++i) EXPECT_NEAR(logits[1][i], logits[0][i], 1e-5);
}

}  // namespace
}  // namespace tranche::models
