// Sums over the axis `tensor` as chains (tranche.tensor_sums), which have the bits of one rank; and other
// equal bits on meshes with the axis.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "memory_checks.h"
#include "tensor_models.h"
#include "tests/core/rounds.h"
#include "tranche/engine/check_gradients.h"
#include "tranche/kernels/matmul.h"
#include "tranche/models/key_value_cache.h"
#include "tranche/models/llama.h"

namespace tranche::models {
namespace {

using ::testing::HasSubstr;

/// The bits of a run: those of all state at its end, of each step, and of answers between steps.
struct Bits {
  kernels::Digest state;
  std::vector<double> losses, norms;
  double evaluated = 0;
  std::vector<float> logits;
  std::vector<std::int32_t> greedy;
  std::int64_t sent = 0, formula = 0;  ///< bytes
};

void expect_same(const Bits& actual, const Bits& expected) {
  EXPECT_EQ(actual.losses, expected.losses);
  EXPECT_EQ(actual.norms, expected.norms);
  EXPECT_EQ(actual.state, expected.state);
  EXPECT_EQ(actual.evaluated, expected.evaluated);
  EXPECT_EQ(actual.logits, expected.logits);
  EXPECT_EQ(actual.greedy, expected.greedy);
}

/// Trains `steps` steps on the micro-batches of any number of data ranks, evaluates, and continues a text.
Bits trained(int ranks, const LanguageModel& model, const Config& config, int steps) {
  Bits bits;
  std::mutex mutex;
  on_ranks(ranks, model.spec(time_steps), config, [&](Engine& engine) {
    const Mesh& mesh = engine.runtime().mesh();
    const int data_rank = mesh.data_rank(engine.runtime().rank());
    const std::int64_t size = engine.config().micro_batch_size;
    const auto rounds = static_cast<std::size_t>(engine.config().accumulation_steps);
    std::vector<TokenData> data(rounds, TokenData(time_steps, model.shape().vocabulary, true));
    Bits mine;
    for (int step = 0; step < steps; ++step) {
      const std::int64_t first = engine.samples();
      train_step(model, engine, [&](std::int64_t m) {
        TokenData& place = data[static_cast<std::size_t>(m)];
        place.draw(first + (m * mesh.data_ranks() + data_rank) * size, size);
        return place.batch();
      });
      const StepResult result = engine.step();
      mine.losses.push_back(result.loss);
      mine.norms.push_back(result.gradient_norm);
    }
    const auto report = nlohmann::json::parse(engine.traffic_report());
    for (const auto& axis : report["by_axis"]) {
      mine.sent += axis["bytes"].get<std::int64_t>();
      const bool known = engine.config().tensor_sums != TensorSums::chain || axis["axis"] != "tensor";
      EXPECT_EQ(axis["formula_bytes"].is_null(), !known) << axis;
      EXPECT_EQ(axis["formula_elements"].is_null(), !known) << axis;
      if (known) mine.formula += axis["formula_bytes"].get<std::int64_t>();
    }
    mine.state = engine.state_digest();
    if (mesh.size(MeshAxis::pipeline) == 1) {
      engine.begin_evaluation();
      for (std::int64_t sample = 0; sample < 12; sample += mesh.data_ranks()) {
        data[0].draw(1000 + sample + data_rank, 1);
        model.evaluate(engine, data[0].batch());
      }
      mine.evaluated = engine.end_evaluation().loss;
    }
    std::vector<std::int32_t> text{5, 17, 0, 23};
    for (int token = 0; token < 4; ++token) {
      mine.logits = model.next_token_logits(engine, text);
      const auto best = std::max_element(mine.logits.begin(), mine.logits.end()) - mine.logits.begin();
      text.push_back(static_cast<std::int32_t>(best));
    }
    KeyValueCache cache(engine, model, 1, 11);
    mine.logits = model.prefill(engine, cache, 0, text);
    mine.greedy = text;
    const std::lock_guard lock(mutex);
    if (engine.runtime().rank() == 0) bits = std::move(mine);
  });
  return bits;
}

/// Sizes that 2, 3 or 4 ranks cut at even elements, in part unevenly.
GptConfig even_gpt(std::int64_t heads) {
  GptConfig model = with_dropout(six_heads());
  model.heads = heads;
  model.inner = heads == 6 ? 60 : 56;
  model.vocabulary = heads == 6 ? 61 : 64;
  return model;
}

Config chained(Config config, DataType dtype = DataType::float32) {
  config.tensor_sums = TensorSums::chain;
  config.precision.compute = config.precision.communication = dtype;
  return config;
}

/// fp32 and bf16, if this machine adds their products in ascending order.
std::vector<DataType> ascending_types() {
  std::vector<DataType> types;
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    if (kernels::matmul_sum_order(DeviceKind::cpu, dtype).ascending) types.push_back(dtype);
  }
  return types;
}

/// Expects the bits of one rank on 2 and more ranks of the axis, alone and together with data ranks.
void expect_bits_of_one_rank(const LanguageModel& model, std::initializer_list<int> sizes, int steps,
                             std::string_view whole = {}, const LoraConfig& lora = {}) {
  const std::vector<DataType> types = ascending_types();
  if (types.empty()) {
    GTEST_SKIP() << "products run by " << kernels::matmul_path(DeviceKind::cpu, DataType::bfloat16) << " and "
                 << kernels::matmul_path(DeviceKind::cpu, DataType::float32)
                 << ", which do not add up in ascending order";
  }
  steps = std::max(steps, 2);  // a single loss does not depend on the update
  for (const DataType dtype : types) {
    if (test::sanitized && dtype != types.front()) continue;
    Config alone = config_of(1);
    alone.precision.compute = alone.precision.communication = dtype;
    alone.lora = lora;
    if (lora.any()) alone.optimizer.learning_rate = 1e-2;
    const Bits one = trained(1, model, alone, steps);
    EXPECT_NE(one.losses.back(), one.losses.front());
    for (const int tensor : sizes) {
      for (const int stage : {0, 3}) {
        if (test::sanitized && (stage != 3 || tensor != *sizes.begin())) continue;
        SCOPED_TRACE(model.describe() + ", " + std::string(name_of(dtype)) +
                     ", tensor=" + std::to_string(tensor) + ", stage " + std::to_string(stage));
        Config cut = chained(config_of(tensor, 1, stage), dtype);
        cut.lora = lora;
        cut.optimizer.learning_rate = alone.optimizer.learning_rate;
        cut.activation_checkpointing = stage == 3;
        if (!whole.empty()) cut.layout[std::string(whole)] = "whole";
        expect_same(trained(tensor, model, cut, steps), one);
      }
    }
  }
}

TEST(TensorChain, GptHasTheBitsOfOneRank) {
  expect_bits_of_one_rank(Gpt(even_gpt(4)), {2, 4}, test::fewer(5));
  if (IsSkipped()) return;
  expect_bits_of_one_rank(Gpt(even_gpt(6)), {2, 3}, test::fewer(5));
}

TEST(TensorChain, BlocksOfALargeVocabularyAreThoseOfOneRank) {
  if (test::sanitized) GTEST_SKIP() << "the bits of a second block are no matter of memory and threads";
  GptConfig model = even_gpt(4);
  model.vocabulary = 4168;  // a block of 4096 columns, which crosses the parts of ranks, and a second one
  expect_bits_of_one_rank(Gpt(model), {4}, 2);
}

TEST(TensorChain, LlamaHasTheBitsOfOneRank) {
  for (const LlamaKind kind : {LlamaKind::llama, LlamaKind::mistral}) {
    LlamaConfig model = eight_heads(kind);
    model.key_value_heads = 4;
    model.inner = 40;
    model.vocabulary = 64;
    expect_bits_of_one_rank(Llama(model), {2, 4}, test::fewer(5));
    if (IsSkipped()) return;
  }
}

TEST(TensorChain, HeadsThatRanksShareAndTheirNormsHaveTheBitsOfOneRank) {
  for (const LlamaKind kind : {LlamaKind::qwen3, LlamaKind::llama, LlamaKind::qwen2}) {
    LlamaConfig model = eight_heads(kind);  // with two heads of keys and values
    model.inner = 48;
    model.vocabulary = 64;
    expect_bits_of_one_rank(Llama(model), {4, 8, 2}, test::fewer(3));
    if (IsSkipped()) return;
  }
}

TEST(TensorChain, TablesThatStayWholeHaveTheBitsOfOneRank) {
  LlamaConfig untied = eight_heads(LlamaKind::llama);
  untied.inner = 40;
  untied.vocabulary = 61;
  for (const bool is_gpt : {true, false}) {
    if (is_gpt) {
      expect_bits_of_one_rank(Gpt(even_gpt(4)), {2}, test::fewer(3), "vocabulary");
    } else {
      expect_bits_of_one_rank(Llama(untied), {2}, test::fewer(3), "vocabulary");
    }
    if (IsSkipped()) return;
  }
}

TEST(TensorChain, MlpsThatStayWholeHaveTheBitsOfOneRank) {
  LlamaConfig llama = eight_heads(LlamaKind::llama);
  llama.inner = 41;  // whole, so that it need not begin at pairs of elements
  llama.vocabulary = 64;
  const LoraConfig lora{.rank = 3, .alpha = 7, .targets = {"all-linear"}};
  expect_bits_of_one_rank(Gpt(even_gpt(4)), {2, 4}, test::fewer(3), "inner");
  if (IsSkipped()) return;
  expect_bits_of_one_rank(Llama(llama), {2, 4}, test::fewer(3), "inner");
  expect_bits_of_one_rank(Gpt(even_gpt(4)), {4}, test::fewer(3), "inner", lora);
}

TEST(TensorChain, AnAdapterOfTheHeadHasTheBitsOfOneRank) {
  const LoraConfig lora{.rank = 3, .alpha = 7, .dropout = 0.1, .targets = {"c_fc", "lm_head"}};
  GptConfig wide = even_gpt(4);
  wide.vocabulary = 4168;  // two blocks, of which the first lies across the parts of ranks
  LlamaConfig untied = eight_heads(LlamaKind::llama);
  untied.inner = 40;
  untied.vocabulary = 64;
  expect_bits_of_one_rank(Gpt(even_gpt(4)), {2, 4}, test::fewer(3), {}, lora);
  if (IsSkipped()) return;
  expect_bits_of_one_rank(Gpt(wide), {4}, 2, {}, lora);
  expect_bits_of_one_rank(Llama(untied), {2, 4}, test::fewer(3), "vocabulary",
                          {.rank = 3, .alpha = 7, .targets = {"lm_head"}});
}

TEST(TensorChain, AdaptersHaveTheBitsOfOneRank) {
  const LoraConfig lora{.rank = 3, .alpha = 7, .dropout = 0.1, .targets = {"all-linear"}};
  LlamaConfig shared = eight_heads(LlamaKind::llama);  // with biases, and two heads of keys and values
  shared.inner = 40;
  shared.vocabulary = 64;
  expect_bits_of_one_rank(Gpt(even_gpt(6)), {2, 3}, test::fewer(4), {}, lora);
  if (IsSkipped()) return;
  expect_bits_of_one_rank(Llama(shared), {2, 4}, test::fewer(4), {}, lora);
}

TEST(TensorChain, DataRanksMicroBatchesAndPipelinesDoNotMatter) {
  const std::vector<DataType> types = ascending_types();
  if (types.empty()) GTEST_SKIP() << "no products here add up in ascending order";
  const Gpt model(even_gpt(4));
  for (const DataType dtype : types) {
    Config of_one = chained(config_of(1), dtype);
    of_one.world_size_invariant = true;
    of_one.train_batch_size = 6;
    of_one.micro_batch_size = 1;
    of_one.accumulation_steps = 0;
    of_one.tie_sum = TieSum::by_use;  // as a pipeline adds up
    const Bits one = trained(1, model, of_one, 4);
    for (const auto& [ranks, mesh] :
         {std::pair(2, "tensor=2"), std::pair(4, "shard=2,tensor=2"), std::pair(6, "shard=3,tensor=2"),
          std::pair(8, "shard=2,tensor=4"), std::pair(4, "pipeline=2,tensor=2")}) {
      Config cut = of_one;
      cut.mesh = mesh;
      cut.stage = ranks % 4;
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + mesh);
      Bits found = trained(ranks, model, cut, 4);
      if (cut.mesh.starts_with("pipeline")) found.evaluated = one.evaluated;
      expect_same(found, one);
    }
  }
}

TEST(TensorChain, PlansHoldToTheByteOnEveryRank) {
  const std::vector<DataType> types = ascending_types();
  if (types.empty()) GTEST_SKIP() << "no products here add up in ascending order";
  for (const auto& [ranks, stage, shared] :
       {std::tuple(2, 0, false), std::tuple(4, 3, false), std::tuple(4, 1, true)}) {
    MemoryCase made{.model = even_gpt(4), .sequence = time_steps, .ranks = ranks, .config = {}};
    made.config.mesh = "tensor=" + std::to_string(ranks);
    made.config.tensor_sums = TensorSums::chain;
    made.config.precision.compute = made.config.precision.communication = types.back();
    made.config.micro_batch_size = 5;
    made.config.accumulation_steps = 2;
    made.config.stage = stage;
    made.config.activation_checkpointing = stage == 3;
    if (stage > 0) {
      made.llama = eight_heads(shared ? LlamaKind::qwen3 : LlamaKind::llama);
      if (!shared) made.llama->key_value_heads = 4;
      made.llama->inner = 40;
      made.llama->vocabulary = 64;
      if (!shared) made.config.layout["inner"] = "whole";
      if (shared) made.config.lora = {.rank = 2, .alpha = 2, .targets = {"all-linear", "lm_head"}};
    }
    const std::vector<MemoryRun> runs = measure_case(made, 3, 2);
    for (made.rank = 0; made.rank < ranks; ++made.rank) {
      SCOPED_TRACE(made.to_string());
      const MemoryRun planned = plan_case(made, 3, 2);
      const MemoryRun& measured = runs[static_cast<std::size_t>(made.rank)];
      for (std::size_t tier = 0; tier < tier_count; ++tier) {
        expect_equal(planned.tiers[tier], measured.tiers[tier]);
      }
      EXPECT_EQ(planned.traffic, measured.traffic);
      EXPECT_EQ(planned.step.block, measured.step.block);
    }
  }
}

TEST(TensorInvariance, TheNumberOfDataRanksChangesNoBit) {
  const Gpt gpt(with_dropout(six_heads()));
  const Llama llama(eight_heads(LlamaKind::llama));  // four ranks share its key and value heads
  const auto compare = [](const LanguageModel& model, int tensor, bool blocks) {
    Config config = config_of(1);
    config.world_size_invariant = true;
    config.train_batch_size = 6;
    config.micro_batch_size = 1;
    config.accumulation_steps = 0;
    config.quantized_gradients = config.quantized_weights = blocks;
    if (blocks) config.stage = 1;
    std::vector<Bits> found;
    for (const int data_ranks : {1, 2, 3, 4}) {
      Config cut = config;
      cut.mesh = "shard=" + std::to_string(data_ranks) + ",tensor=" + std::to_string(tensor);
      if (!blocks) cut.stage = data_ranks - 1;
      if (cut.stage == 0 && blocks) cut.stage = 1;
      found.push_back(trained(data_ranks * tensor, model, cut, 3));
      SCOPED_TRACE(cut.mesh);
      expect_same(found.back(), found.front());
      EXPECT_EQ(found.back().sent, found.back().formula);
    }
  };
  for (const bool blocks : {false, true}) {
    compare(gpt, 2, blocks);
    compare(llama, 4, blocks);
  }
}

TEST(TensorInt8, StagesAndBucketsHaveEqualBitsAndTheFormulasTraffic) {
  const Gpt gpt(with_dropout(six_heads()));
  const Llama llama(eight_heads(LlamaKind::qwen3));
  const auto compare = [](const LanguageModel& model, int tensor) {
    const auto config_at = [&](int stage, bool blocks) {
      Config config = config_of(tensor, 2, stage);
      config.precision.compute = config.precision.communication = DataType::bfloat16;
      config.quantized_gradients = config.quantized_weights = blocks;
      return config;
    };
    const Bits first = trained(2 * tensor, model, config_at(1, true), 5);
    const Bits whole = trained(2 * tensor, model, config_at(1, false), 5);
    EXPECT_NE(first.state, whole.state) << "blocks have an effect";
    EXPECT_LT(first.sent, whole.sent) << "messages are shorter";
    EXPECT_LE(largest_relative_difference(first.losses, whole.losses), 0.02);
    for (const int stage : {1, 2, 3}) {
      for (const bool small_buckets : {false, true}) {
        Config config = config_at(stage, true);
        if (small_buckets) config.reduce_bucket_elements = config.allgather_bucket_elements = 600;
        SCOPED_TRACE(model.describe() + " stage " + std::to_string(stage) + (small_buckets ? " small" : ""));
        const Bits found = trained(2 * tensor, model, config, 5);
        expect_same(found, first);
        EXPECT_EQ(found.sent, found.formula);
      }
    }
  };
  compare(gpt, 2);
  compare(llama, 4);
}

std::string refusal(int ranks, const LanguageModel& model, const Config& config) {
  try {
    on_ranks(ranks, model.spec(time_steps), config, [](Engine&) {});
  } catch (const ConfigurationError& error) {
    return error.message();
  }
  return "accepted";
}

TEST(TensorChainRefusals, SayWhy) {
  const DataType fp32 = DataType::float32, bf16 = DataType::bfloat16;
  if (!kernels::matmul_sum_order(DeviceKind::cpu, fp32).ascending) {
    EXPECT_EQ(refusal(2, Gpt(even_gpt(4)), chained(config_of(2))),
              "tranche.tensor_sums: chain: products of fp32 run by \"" +
                  std::string(kernels::matmul_path(DeviceKind::cpu, fp32)) +
                  "\" here, which does not add up in ascending order, so that no chain has the bits of one "
                  "rank; write rank_order");
  }
  const kernels::SumOrder order = kernels::matmul_sum_order(DeviceKind::cpu, bf16);
  if (!order.ascending || order.step == 1) return;
  GptConfig odd = even_gpt(4);
  odd.inner = 50;
  EXPECT_EQ(
      refusal(2, Gpt(odd), chained(config_of(2), bf16)),
      "tranche.tensor_sums: chain: products run by \"own bf16 panels (avx512_bf16)\" here, which adds 2 "
      "elements at once, but tensor=2 cuts transformer.h.0.mlp.c_fc.weight at element 25; write "
      "rank_order, or another size of tensor");
  odd.inner = 61;
  EXPECT_THAT(refusal(2, Gpt(odd), chained(config_of(2), bf16)), HasSubstr("mlp.c_fc.weight at element 61"));
}

TEST(TensorChainRefusals, CheckGradientsIsForOneRank) {
  const Gpt model(six_heads());
  std::string text = "accepted";
  std::mutex mutex;
  on_ranks(2, model.spec(time_steps), config_of(2), [&](Engine& engine) {
    TokenData data(time_steps, model.shape().vocabulary, true);
    data.draw(0, batch);
    try {
      (void)check_gradients(engine, [&] { model.forward_backward(engine, data.batch()); });
    } catch (const ConfigurationError& error) {
      const std::lock_guard lock(mutex);
      text = error.message();
    }
  });
  EXPECT_EQ(text,
            "check_gradients() on a mesh with the axis tensor (tensor=2), whose ranks have parts of each "
            "tensor: check on one rank");
}

}  // namespace
}  // namespace tranche::models
