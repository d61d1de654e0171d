// Models whose sequences the axis `context` of a mesh cuts: activations have the bits of one rank, losses and
// gradients are those of one rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "context_models.h"
#include "tranche/comm/communicator.h"
#include "tranche/models/llama.h"

namespace tranche::models {
namespace {

Gpt gpt() {
  return Gpt(with_dropout(six_heads()));
}

void expect_losses(const std::vector<double>& actual, const std::vector<double>& wanted) {
  EXPECT_LE(largest_relative_difference(actual, wanted), 1e-5);
}

std::string context(int ranks) {
  return "context=" + std::to_string(ranks);
}

TEST(ContextParallelGpt, TwentyStepsHaveTheLossesOfOneRank) {
  const auto one = losses_of(1, gpt(), config_of(1), {});
  EXPECT_LT(one[19], one[0]) << "it learns";
  for (const int ranks : {2, 4}) {
    SCOPED_TRACE(ranks);
    expect_losses(losses_of(ranks, gpt(), on_mesh(context(ranks)), {}), one);
  }
}

TEST(ContextParallelGpt, GradientsAreThoseOfOneRank) {
  const Gpt model = gpt();
  const auto one = train_model(1, model, config_of(1), 1, 16, true, DeviceKind::cpu, nullptr, true);
  for (const int ranks : {2, 4, 8}) {
    const auto cut =
        train_model(ranks, model, on_mesh(context(ranks)), 1, 16, true, DeviceKind::cpu, nullptr, true);
    for (const auto& [name, gradient] : one.gradients) {
      const double size =
          std::sqrt(std::inner_product(gradient.begin(), gradient.end(), gradient.begin(), 0.0));
      double difference = 0;
      for (std::size_t i = 0; i < gradient.size(); ++i) {
        difference = std::max(difference, std::abs(cut.gradients.at(name)[i] - gradient[i]));
      }
      EXPECT_LE(difference, 1e-5 * size) << name << " on " << ranks << " ranks";
    }
  }
}

TEST(ContextParallel, ActivationsAndLogitsHaveTheBitsOfOneRank) {
  const auto expect_bits = [](const LanguageModel& model, const ContextRun& run) {
    const TokenRows one = forward_rows(1, model, config_of(1), run);
    EXPECT_EQ(one.logits.size(), static_cast<std::size_t>(batch * run.time));
    for (const int ranks : {2, 4}) {
      SCOPED_TRACE(model.architecture() + " on " + std::to_string(ranks) + " ranks");
      const TokenRows cut = forward_rows(ranks, model, on_mesh(context(ranks)), run);
      EXPECT_EQ(cut.residual, one.residual);
      EXPECT_EQ(cut.logits, one.logits);
    }
  };
  expect_bits(gpt(), {.time = 16});
  for (const LlamaKind kind : all_kinds) {
    expect_bits(Llama(eight_heads(kind)), {.time = 32, .documents = true});
    expect_bits(Llama(eight_heads(kind)), {.time = 24});
  }
}

TEST(ContextParallelLlama, FourDocumentsARowHaveTheLossesOfOneRank) {
  for (const LlamaKind kind : all_kinds) {
    const Llama model(eight_heads(kind));
    const ContextRun run{.time = 32, .documents = true};
    const auto one = losses_of(1, model, config_of(1), run);
    for (const int ranks : {2, 4}) {
      SCOPED_TRACE(model.architecture() + " on " + std::to_string(ranks) + " ranks");
      expect_losses(losses_of(ranks, model, on_mesh(context(ranks)), run), one);
    }
  }
}

TEST(ContextParallelGpt, StagesShardsAndRecomputationHaveTheSameLosses) {
  Config of_one = config_of(1);
  of_one.train_batch_size = of_one.micro_batch_size = 2 * batch;
  const ContextRun run{.steps = 3};
  const auto one = losses_of(1, gpt(), of_one, run);
  for (const int stage : {0, 1, 2, 3}) {
    SCOPED_TRACE(stage);
    Config cut = on_mesh("shard=2,context=2", 2, stage);
    cut.activation_checkpointing = stage % 2 == 1;
    expect_losses(losses_of(4, gpt(), cut, run), one);
  }
}

TEST(ContextParallelGpt, GoesBesideTensorAndInStagesOfAPipeline) {
  Config of_one = config_of(1);
  of_one.train_batch_size = 2 * batch;
  of_one.accumulation_steps = 2;
  const ContextRun run{.steps = 5};
  const auto one = losses_of(1, gpt(), of_one, run);
  for (const auto& [ranks, mesh] : {std::pair(4, "context=2,tensor=2"), std::pair(6, "context=2,tensor=3"),
                                    std::pair(4, "pipeline=2,context=2"),
                                    std::pair(8, "pipeline=2,context=2,tensor=2")}) {
    SCOPED_TRACE(mesh);
    Config cut = of_one;
    cut.mesh = mesh;
    expect_losses(losses_of(ranks, gpt(), cut, run), one);
  }
}

TEST(ContextParallelGpt, AdaptersWithDropoutHaveTheLossesOfOneRank) {
  const auto adapted = [](Config config) {
    config.lora = {.rank = 3, .alpha = 7, .dropout = 0.1f, .targets = {"all-linear", "lm_head"}};
    return config;
  };
  const ContextRun run{.steps = 10};
  const auto one = losses_of(1, gpt(), adapted(config_of(1)), run);
  expect_losses(losses_of(2, gpt(), adapted(on_mesh(context(2))), run), one);
  expect_losses(losses_of(4, gpt(), adapted(on_mesh("context=2,tensor=2")), run), one);
}

TEST(ContextParallelGpt, Bf16StaysAsNearAsBf16OfOneRank) {
  const auto narrow = [](Config config) {
    config.precision.compute = config.precision.communication = DataType::bfloat16;
    return config;
  };
  const auto fp32 = losses_of(1, gpt(), config_of(1), {});
  const auto one = losses_of(1, gpt(), narrow(config_of(1)), {});
  EXPECT_LE(largest_relative_difference(losses_of(2, gpt(), narrow(on_mesh(context(2))), {}), one),
            std::max(largest_relative_difference(one, fp32), 1e-3));
}

/// Elements that rank 0 sends over the axis in a micro-batch.
std::int64_t sent(int ranks, const LanguageModel& model, bool recompute, std::int64_t time) {
  std::int64_t elements = 0;
  Config config = on_mesh(context(ranks));
  config.activation_checkpointing = recompute;
  on_ranks(ranks, model.spec(time), config, [&](Engine& engine) {
    TokenData data(time, model.shape().vocabulary, true);
    data.draw(0, batch);
    const auto now = [&] { return engine.runtime().context()->meter().total(Traffic::data).elements; };
    const std::int64_t before = now();
    model.forward_backward(engine, data.batch());
    if (engine.runtime().rank() == 0) elements = now() - before;
    (void)engine.step();
  });
  return elements;
}

TEST(ContextParallel, GatheredKeysAndValuesSendWhatTheFormulaSays) {
  for (const int ranks : {2, 4}) {
    const auto formula = [&](std::int64_t times, std::int64_t time, std::int64_t width, std::int64_t layers) {
      return times * (ranks - 1) * batch * time / ranks * width * layers;
    };
    EXPECT_EQ(sent(ranks, gpt(), false, 16), formula(6, 16, 24, gpt().shape().layers));
    EXPECT_EQ(sent(ranks, gpt(), true, 16), formula(8, 16, 24, gpt().shape().layers));
    const Llama llama(eight_heads(LlamaKind::llama));
    EXPECT_EQ(sent(ranks, llama, false, 32), formula(6, 32, 2 * 6, llama.shape().layers));
  }
}

TEST(ContextParallelGpt, ASequenceThatDoesNotDivideIsRefused) {
  on_ranks(2, gpt().spec(16), on_mesh(context(2)), [&](Engine& engine) {
    TokenData data(14, 61, false);
    data.draw(0, batch);
    try {
      (void)gpt().pass_of(engine, data.batch(), true);
      FAIL();
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(),
                  testing::HasSubstr("a sequence of 14 tokens cannot be cut into 4 equal runs, of which each of "
                                     "the 2 ranks of the axis context computes two; pad it to a multiple of 4 "
                                     "with targets that are left out"));
    }
  });
}

}  // namespace
}  // namespace tranche::models
