// Models whose sequences the axis `context` of a mesh cuts: activations have the bits of one rank, and losses
// and gradients are near those of one rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "context_models.h"
#include "tranche/comm/communicator.h"
#include "tranche/kernels/matmul.h"
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

// tranche.update: as_reduced has the bits of updates at the boundary of the same mesh. With 9 tokens the
// ranks' parts hold padding, which no step counts.
TEST(ContextParallelGpt, EarlyUpdatesHaveTheBitsOfTheBoundary) {
  for (const auto& [ranks, mesh, stage, length] :
       {std::tuple(2, "context=2", 0, 16), std::tuple(2, "context=2", 3, 9),
        std::tuple(4, "shard=2,context=2", 3, 16), std::tuple(4, "context=2,tensor=2", 2, 16)}) {
    Config config = on_mesh(mesh, mesh == std::string("shard=2,context=2") ? 2 : 1, stage);
    config.gradient_clipping = 0;
    const GptRun expected = train_model(ranks, gpt(), config, 3, length);
    EXPECT_NE(expected.losses.back(), expected.losses.front());
    config.update = UpdateTime::as_reduced;
    config.offload.optimizer = stage == 0 ? OffloadTier::cpu : OffloadTier::nvme;
    config.offload.parameters = stage == 3 ? OffloadTier::cpu : OffloadTier::none;
    config.offload.nvme_path = std::filesystem::temp_directory_path().string();
    const GptRun early = train_model(ranks, gpt(), config, 3, length);
    EXPECT_EQ(early.losses, expected.losses) << mesh << ", stage " << stage;
    EXPECT_TRUE(early.digest == expected.digest) << mesh << ", stage " << stage;
  }
}

/// A model with heads of 32 elements, for which loops of this repository compute attention in bf16.
Gpt wide_gpt() {
  GptConfig config = with_dropout(six_heads());
  config.width = 192;
  config.positions = 192;
  return Gpt(config);
}

Llama wide_llama(LlamaKind kind) {
  LlamaConfig config = eight_heads(kind);
  config.head_dim = 32;
  config.positions = 192;
  if (config.window > 0) config.window = 70;
  return Llama(config);
}

/// A row of a product has the same bits among any number of rows if its sum goes through k in order.
void expect_rows(const std::map<std::pair<std::int64_t, std::int64_t>, std::vector<float>>& actual,
                 const std::map<std::pair<std::int64_t, std::int64_t>, std::vector<float>>& wanted,
                 bool bits) {
  ASSERT_EQ(actual.size(), wanted.size());
  double largest = 0;
  std::size_t differing = 0;
  for (const auto& [token, row] : wanted) {
    const std::vector<float>& got = actual.at(token);
    ASSERT_EQ(got.size(), row.size());
    differing += got == row ? 0 : 1;
    for (std::size_t i = 0; i < row.size(); ++i) {
      largest = std::max<double>(largest, std::abs(got[i] - row[i]));
    }
  }
  if (bits) {
    EXPECT_EQ(differing, 0U) << "largest difference " << largest;
  }
  EXPECT_LE(largest, 1e-6);
}

void expect_activations(const LanguageModel& model, const ContextRun& run, ContextExchange exchange) {
  for (const DataType dtype : {DataType::bfloat16, DataType::float32}) {
    const bool bits = kernels::matmul_sum_order(DeviceKind::cpu, dtype).ascending;
    if (dtype == DataType::bfloat16 && !bits) continue;  // the last bit of a product is 2^-8 of it
    Config config = config_of(1);
    config.precision.compute = config.precision.communication = dtype;
    const TokenRows one = forward_rows(1, model, config, run);
    EXPECT_EQ(one.logits.size(), static_cast<std::size_t>(batch * run.time));
    config.context_exchange = exchange;
    for (const int ranks : {2, 4}) {
      SCOPED_TRACE(model.describe() + " on " + std::to_string(ranks) + " ranks in " +
                   std::string(name_of(dtype)));
      config.mesh = context(ranks);
      const TokenRows cut = forward_rows(ranks, model, config, run);
      expect_rows(cut.residual, one.residual, bits);
      expect_rows(cut.logits, one.logits, bits);
    }
  }
}

TEST(ContextParallel, ActivationsAndLogitsHaveTheBitsOfOneRank) {
  // Parts of 48 and 24 tokens, which are not multiples of attention's tiles.
  expect_activations(wide_gpt(), {.time = 192}, ContextExchange::gather);
  for (const LlamaKind kind : all_kinds) {
    expect_activations(wide_llama(kind), {.time = 192, .documents = true}, ContextExchange::gather);
  }
  expect_activations(wide_llama(LlamaKind::mistral), {.time = 96}, ContextExchange::gather);
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
  for (const auto& [ranks, mesh] :
       {std::pair(4, "context=2,tensor=2"), std::pair(6, "context=2,tensor=3"),
        std::pair(4, "pipeline=2,context=2"), std::pair(8, "pipeline=2,context=2,tensor=2")}) {
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

Config exchanging_heads(Config config) {
  config.context_exchange = ContextExchange::ulysses;
  return config;
}

/// A GPT whose heads two and four ranks can share.
Gpt eight_headed_gpt() {
  GptConfig config = with_dropout(tiny_gpt());
  config.heads = 8;
  return Gpt(config);
}

/// A model with four heads of keys and values.
Llama llama_to_exchange(LlamaKind kind) {
  LlamaConfig config = eight_heads(kind);
  config.key_value_heads = 4;
  return Llama(config);
}

TEST(ContextExchangeOfHeads, HasTheLossesOfOneRank) {
  const auto one = losses_of(1, eight_headed_gpt(), config_of(1), {});
  for (const int ranks : {2, 4}) {
    expect_losses(losses_of(ranks, eight_headed_gpt(), exchanging_heads(on_mesh(context(ranks))), {}), one);
  }
  for (const LlamaKind kind : all_kinds) {
    const Llama model = llama_to_exchange(kind);
    const ContextRun run{.time = 32, .documents = true};
    const auto of_one = losses_of(1, model, config_of(1), run);
    for (const int ranks : {2, 4}) {
      SCOPED_TRACE(model.architecture() + " on " + std::to_string(ranks) + " ranks");
      expect_losses(losses_of(ranks, model, exchanging_heads(on_mesh(context(ranks))), run), of_one);
    }
  }
}

TEST(ContextExchangeOfHeads, GoesWithStagesRecomputationTensorAndPipelines) {
  Config of_one = config_of(1);
  of_one.train_batch_size = 2 * batch;
  of_one.accumulation_steps = 2;
  const ContextRun run{.steps = 3};
  const Gpt model = eight_headed_gpt();
  const auto one = losses_of(1, model, of_one, run);
  for (const int stage : {0, 1, 2, 3}) {
    SCOPED_TRACE(stage);
    Config cut = exchanging_heads(of_one);
    cut.mesh = stage == 0 ? "context=2,tensor=2" : stage == 1 ? "pipeline=2,context=2" : "context=4";
    cut.stage = stage;
    cut.activation_checkpointing = stage % 2 == 1;
    expect_losses(losses_of(4, model, cut, run), one);
  }
}

TEST(ContextExchangeOfHeads, ActivationsAndLogitsHaveTheBitsOfOneRank) {
  GptConfig config = with_dropout(tiny_gpt());
  config.width = 256;
  config.heads = 8;
  config.positions = 192;
  expect_activations(Gpt(config), {.time = 192}, ContextExchange::ulysses);
  for (const LlamaKind kind : {LlamaKind::mistral, LlamaKind::qwen3}) {
    LlamaConfig llama = llama_to_exchange(kind).config();
    llama.head_dim = 32;
    llama.positions = 192;
    expect_activations(Llama(llama), {.time = 192, .documents = true}, ContextExchange::ulysses);
  }
}

/// The bytes of activations that a block of the model saves on a rank.
std::int64_t saved_bytes(const LanguageModel& model, ContextExchange exchange, int tensors) {
  std::int64_t bytes = 0;
  Config config = on_mesh(context(2));
  config.context_exchange = exchange;
  on_ranks(2, model.spec(16), config, [&](Engine& engine) {
    TokenData data(16, model.shape().vocabulary, false);
    data.draw(0, batch);
    const InferenceScope scope(engine);
    const Pass pass = model.pass_of(engine, data.batch(), true);
    const StepTensors saved = model.acquire_block_activations(pass);
    std::int64_t sum = 0;
    for (int i = 0; i < tensors; ++i) sum += saved[i].bytes();
    if (engine.runtime().rank() == 0) bytes = sum;
  });
  return bytes;
}

TEST(ContextExchangeOfHeads, KeepsTheOutputBesideWhatIsSavedAnyway) {
  const auto more = [](const LanguageModel& model, int tensors) {
    return saved_bytes(model, ContextExchange::ulysses, tensors) -
           saved_bytes(model, ContextExchange::gather, tensors);
  };
  const std::int64_t row = batch * 16 / 2 * std::int64_t{sizeof(float)};
  EXPECT_EQ(more(eight_headed_gpt(), 12), row * 24);
  EXPECT_EQ(more(llama_to_exchange(LlamaKind::llama), 15), row * 8 * 6);
  // The backward of Qwen3's norms reads queries and keys from before the norms.
  EXPECT_EQ(more(llama_to_exchange(LlamaKind::qwen3), 15), row * (8 + 8 + 4) * 6);
}

TEST(ContextExchangeOfHeads, HeadsThatRanksCannotShareAreRefused) {
  const auto refused = [](int ranks, const LanguageModel& model, const std::string& mesh) -> std::string {
    try {
      on_ranks(ranks, model.spec(16), exchanging_heads(on_mesh(mesh)), [](Engine&) {});
    } catch (const Error& error) {
      return error.what();
    }
    return "not refused";
  };
  using testing::HasSubstr;
  EXPECT_THAT(
      refused(4, gpt(), "context=4"),
      HasSubstr("tranche.context_exchange ulysses with context=4: 6 heads cannot be shared by 4 ranks; "
                "use gather, or a context of 2, 3 or 6"));
  EXPECT_THAT(refused(4, Llama(eight_heads(LlamaKind::llama)), "context=4"),
              HasSubstr("tranche.context_exchange ulysses with context=4: 2 key and value heads cannot be "
                        "shared by 4 ranks; use gather, or a context of 2"));
  EXPECT_THAT(
      refused(4, gpt(), "context=2,tensor=2"),
      HasSubstr("3 heads of a rank of tensor cannot be shared by 2 ranks; use gather, or a context of "
                "3"));
}

/// The elements that rank 0 sends on the axis in a micro-batch, and the value of ModelSpec::context_elements.
std::int64_t sent(int ranks, const LanguageModel& model, bool recompute, std::int64_t time,
                  ContextExchange exchange = ContextExchange::gather) {
  std::int64_t elements = 0;
  Config config = on_mesh(context(ranks));
  config.context_exchange = exchange;
  config.activation_checkpointing = recompute;
  on_ranks(ranks, model.spec(time), config, [&](Engine& engine) {
    TokenData data(time, model.shape().vocabulary, true);
    data.draw(0, batch);
    const auto now = [&] { return engine.runtime().context()->meter().total(Traffic::data).elements; };
    const std::int64_t before = now();
    model.forward_backward(engine, data.batch());
    const int uses = static_cast<int>(model.shape().layers) + 2;
    EXPECT_EQ(now() - before,
              engine.model().context_elements(engine.config(), engine.runtime().mesh(), 0, uses));
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
    // Padding is sent, too.
    EXPECT_EQ(sent(ranks, gpt(), false, 13), formula(6, 16, 24, gpt().shape().layers));
  }
}

TEST(ContextExchangeOfHeads, SendsWhatTheFormulaSays) {
  const Gpt model = eight_headed_gpt();
  const Llama llama = llama_to_exchange(LlamaKind::qwen3);
  for (const int ranks : {2, 4}) {
    const auto formula = [&](std::int64_t times, std::int64_t time, std::int64_t width, std::int64_t layers) {
      return times * (ranks - 1) * batch * time * width * layers / (ranks * ranks);
    };
    constexpr auto ulysses = ContextExchange::ulysses;
    EXPECT_EQ(sent(ranks, model, false, 16, ulysses), formula(8, 16, 24, model.shape().layers));
    EXPECT_EQ(sent(ranks, model, true, 16, ulysses), formula(12, 16, 24, model.shape().layers));
    EXPECT_EQ(sent(ranks, model, false, 13, ulysses), formula(8, 16, 24, model.shape().layers));
    EXPECT_EQ(sent(ranks, llama, false, 32, ulysses), formula(4, 32, 8 * 6 + 4 * 6, llama.shape().layers));
  }
}

}  // namespace
}  // namespace tranche::models
