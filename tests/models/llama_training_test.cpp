// Training runs of the Llama family: compared with fp64, between ranks, stages, tiers and meshes; evaluation
// and logits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "reference_llama.h"
#include "tests/core/rounds.h"
#include "tiny_llama.h"
#include "training_fixture.h"
#include "tranche/models/llama.h"

namespace tranche::models {
namespace {

constexpr std::int64_t sequence = 11;

/// fp32 training with decay, clipping and accumulation.
Config llama_training(int ranks) {
  Config config = plain_config(2 * ranks, ranks);
  config.accumulation_steps = 2;
  config.micro_batch_size = 1;
  config.gradient_clipping = 0.5;
  config.reduction = ReductionPolicy::micro_batch;
  config.optimizer.learning_rate = 2e-3;
  config.optimizer.parameters["weight_decay"] = 0.1;
  return config;
}

TEST(LlamaTraining, FiftyStepsInFp32AgreeWithFp64) {
  const int steps = test::fewer(50);
  for (const LlamaKind kind : all_kinds) {
    const LlamaConfig model = tiny_llama(kind);
    Config config = llama_training(1);
    config.accumulation_steps = 1;
    config.micro_batch_size = config.train_batch_size = 8;
    reference_training::Tensors weights;
    on_ranks(1, Llama(model).spec(sequence), config, [&](Engine& engine) { weights = read_all(engine); });
    reference_training::Optimizer optimizer(
        {.learning_rate = 2e-3, .weight_decay = 0.1, .clipping = config.gradient_clipping});
    const GptRun run = train_model(1, Llama(model), config, steps, sequence, true);
    TokenData data(sequence, model.vocabulary, true);
    double largest = 0;
    for (int step = 0; step < steps; ++step) {
      data.draw(8 * step, 8);
      auto gradients = reference_training::zeros(weights);
      const auto loss =
          reference_training::llama(model, weights, {data.tokens, data.targets, sequence}, &gradients);
      const double wanted = loss.sum / static_cast<double>(loss.tokens);
      largest = std::max(largest, std::abs(run.losses[static_cast<std::size_t>(step)] - wanted) / wanted);
      (void)optimizer.update(weights, gradients, loss.tokens);
    }
    EXPECT_LE(largest, 1e-5) << model.architecture();
    if (steps == 50) {
      EXPECT_LT(run.losses.back(), run.losses.front() - 0.2) << "it learns";
    }
  }
}

/// Settings that may change the places of state and its transfers, but no bit.
struct Placement {
  const char* name;
  std::function<void(Config&)> apply;
};

std::vector<Placement> placements(int ranks) {
  std::vector<Placement> all;
  for (const int stage : {1, 2, 3}) {
    all.push_back({stage == 1   ? "stage 1"
                   : stage == 2 ? "stage 2"
                                : "stage 3",
                   [stage](Config& config) { config.stage = stage; }});
  }
  all.push_back({"optimizer in host memory", [](Config& config) {
                   config.stage = 2;
                   config.offload.optimizer = OffloadTier::cpu;
                 }});
  all.push_back({"all on NVMe, recomputed", [](Config& config) {
                   config.stage = 3;
                   config.offload.optimizer = config.offload.parameters = OffloadTier::nvme;
                   config.offload.nvme_path = std::filesystem::temp_directory_path().string();
                   config.activation_checkpointing = config.offload.activations = true;
                 }});
  if (ranks == 4) {
    all.push_back({"a mesh", [](Config& config) {
                     config.stage = 3;
                     config.mesh = "replicate=2, shard=2";
                   }});
    all.push_back({"copies of parameters", [](Config& config) {
                     config.stage = 3;
                     config.mesh = "replicate=2, shard=2";
                     config.replicate = Replicate::parameters;
                   }});
  }
  return all;
}

TEST(LlamaTraining, StagesTiersAndMeshesGiveTheSameBits) {
  int point = 0;
  for (const LlamaKind kind : {LlamaKind::llama, LlamaKind::qwen3}) {
    const Llama model(tiny_llama(kind));
    for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
      for (int ranks = 1; ranks <= 5; ++ranks) {
        if (dtype == DataType::bfloat16 && ranks % 2 == 1) continue;
        Config config = llama_training(ranks);
        config.precision.compute = config.precision.communication = dtype;
        const GptRun one_group = train_model(ranks, model, config, 3, sequence, true);
        // A mesh first adds up within replicas, like one group with a reduction order of that size.
        config.reduction_group = ranks == 4 ? 2 : 0;
        const GptRun brackets = train_model(ranks, model, config, 3, sequence, true);
        config.reduction_group = 0;
        for (const Placement& placement : placements(ranks)) {
          if (!test::swept(point++, 7)) continue;
          Config other = config;
          placement.apply(other);
          const GptRun& wanted = other.mesh.empty() ? one_group : brackets;
          const GptRun run = train_model(ranks, model, other, 3, sequence, true);
          const std::string trace = std::string(model.architecture()) + ", " + std::to_string(ranks) +
                                    " ranks, " + std::string(name_of(dtype)) + ", " + placement.name;
          EXPECT_EQ(run.digest, wanted.digest) << trace;
          EXPECT_EQ(run.losses, wanted.losses) << trace;
        }
      }
    }
  }
}

TEST(LlamaTraining, RanksWithAPartOfTheBatchAgreeWithOneRank) {
  const Llama model(tiny_llama(LlamaKind::qwen3));
  Config config = llama_training(1);
  config.micro_batch_size = 12;
  config.train_batch_size = 24;
  const GptRun one = train_model(1, model, config, 10, sequence, true);
  for (const int ranks : {2, 3, 4}) {
    config.micro_batch_size = 12 / ranks;
    const GptRun run = train_model(ranks, model, config, 10, sequence, true);
    for (std::size_t i = 0; i < one.losses.size(); ++i) {
      EXPECT_NEAR(run.losses[i], one.losses[i], 1e-5 * one.losses[i]) << ranks << " ranks, step " << i;
    }
  }
}

TEST(LlamaTraining, DropoutOfAttentionIsKeyedAndOffInEvaluation) {
  LlamaConfig with = tiny_llama(LlamaKind::llama);
  with.attention_dropout = 0.3f;
  Config config = llama_training(2);
  const GptRun plain = train_model(2, Llama(tiny_llama(LlamaKind::llama)), config, 2, sequence);
  const GptRun dropped = train_model(2, Llama(with), config, 2, sequence);
  config.stage = 3;
  config.activation_checkpointing = true;
  const GptRun recomputed = train_model(2, Llama(with), config, 2, sequence);
  EXPECT_NE(dropped.losses, plain.losses);
  EXPECT_EQ(recomputed.digest, dropped.digest);
  const auto evaluated = [&](const LlamaConfig& model) {
    double loss = 0;
    on_ranks(1, Llama(model).spec(sequence), llama_training(1), [&](Engine& engine) {
      TokenData data(sequence, model.vocabulary, true);
      data.draw(0, 1);
      engine.begin_evaluation();
      Llama(model).evaluate(engine, data.batch());
      loss = engine.end_evaluation().loss;
    });
    return loss;
  };
  EXPECT_EQ(evaluated(with), evaluated(tiny_llama(LlamaKind::llama)));
}

/// Rows of several documents have the losses and gradients of each document alone.
TEST(LlamaTraining, PackedDocumentsHaveTheLossOfEachAlone) {
  for (const LlamaKind kind : all_kinds) {
    LlamaConfig model = tiny_llama(kind);
    model.initializer_range = 0.3f;  // so that the visible tokens influence the loss
    const Llama llama(model);
    on_ranks(1, llama.spec(sequence), llama_training(1), [&](Engine& engine) {
      TokenData data(sequence, model.vocabulary, false);
      data.draw(3, 1);
      const auto loss_of = [&](const TokenBatch& batch) {
        engine.begin_evaluation();
        llama.evaluate(engine, batch);
        return engine.end_evaluation().loss;
      };
      constexpr std::int64_t first = 4;
      std::vector<std::int32_t> begin, positions;
      for (std::int32_t t = 0; t < sequence; ++t) {
        begin.push_back(t < first ? 0 : first);
        positions.push_back(t < first ? t : t - static_cast<std::int32_t>(first));
      }
      TokenBatch packed = data.batch();
      packed.document_begin = {begin.data(), DataType::int32, packed.tokens.shape};
      packed.positions = {positions.data(), DataType::int32, packed.tokens.shape};
      const auto part = [&](std::int64_t from, std::int64_t count) {
        return TokenBatch{{data.tokens.data() + from, DataType::int32, {1, count}},
                          {data.targets.data() + from, DataType::int32, {1, count}},
                          data.samples};
      };
      const double apart =
          (loss_of(part(0, first)) * first + loss_of(part(first, sequence - first)) * (sequence - first)) /
          sequence;
      EXPECT_NEAR(loss_of(packed), apart, 1e-6 * apart) << model.architecture();
      EXPECT_GT(std::abs(loss_of(data.batch()) - apart), 1e-5) << "boundaries have an effect";
    });
  }
}

}  // namespace
}  // namespace tranche::models
