// Low-rank adapters under the engine: gradients compared with fp64, equal bits for all settings that must not
// change them, memory, and refusals.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "own_schedule.h"
#include "reference_llama.h"
#include "reference_models.h"
#include "tests/core/rounds.h"
#include "tiny_llama.h"
#include "training_fixture.h"
#include "tranche/device/ledger.h"
#include "tranche/engine/lora.h"
#include "tranche/models/linear.h"
#include "tranche/models/llama.h"

namespace tranche::models {
namespace {

using reference_training::Tensor;
using reference_training::Tensors;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::int64_t sequence = 11;

Config lora_config(int ranks, std::vector<std::string> targets = {"all-linear"}) {
  Config config = plain_config(2 * ranks, ranks);
  config.optimizer.learning_rate = 2e-2;
  config.lora = {.rank = 3, .alpha = 7, .targets = std::move(targets)};
  return config;
}

/// An adapter with its layer's weight, in fp64.
struct Adapter {
  std::string weight, a_name, b_name;
  std::int64_t in = 0, out = 0, rank = 0;
  bool in_out = false;
  double scale = 1;
  Tensor a, b;
  std::size_t place(std::int64_t o, std::int64_t i) const {
    return static_cast<std::size_t>(in_out ? i * out + o : o * in + i);
  }
};

std::vector<Adapter> adapters_of(Engine& engine, const Tensors& weights) {
  std::vector<Adapter> all;
  for (const UnitSpec& unit : engine.model().units()) {
    for (const LowRankAdapter& from : unit.adapters) {
      const auto tensor = [&](int index) { return unit.tensors[static_cast<std::size_t>(index)]; };
      Adapter adapter;
      adapter.weight = tensor(from.weight).name;
      adapter.a_name = tensor(from.a).name;
      adapter.b_name = tensor(from.b).name;
      adapter.rank = tensor(from.a).shape[0];
      adapter.in = tensor(from.a).shape[1];
      adapter.out = tensor(from.b).shape[0];
      adapter.in_out = tensor(from.weight).linear == LinearLayout::in_out;
      adapter.scale = from.scale;
      adapter.a = weights.at(adapter.a_name);
      adapter.b = weights.at(adapter.b_name);
      all.push_back(std::move(adapter));
    }
  }
  return all;
}

/// W + scale B A.
void merge(const Adapter& adapter, Tensor& weight) {
  for (std::int64_t o = 0; o < adapter.out; ++o) {
    for (std::int64_t i = 0; i < adapter.in; ++i) {
      double sum = 0;
      for (std::int64_t r = 0; r < adapter.rank; ++r) {
        sum += adapter.b[static_cast<std::size_t>(o * adapter.rank + r)] *
               adapter.a[static_cast<std::size_t>(r * adapter.in + i)];
      }
      weight[adapter.place(o, i)] += adapter.scale * sum;
    }
  }
}

/// The gradients of A and B, given that of the merged weight.
std::pair<Tensor, Tensor> unmerged(const Adapter& adapter, const Tensor& d_weight) {
  Tensor d_a(adapter.a.size()), d_b(adapter.b.size());
  for (std::int64_t o = 0; o < adapter.out; ++o) {
    for (std::int64_t i = 0; i < adapter.in; ++i) {
      const double d = adapter.scale * d_weight[adapter.place(o, i)];
      for (std::int64_t r = 0; r < adapter.rank; ++r) {
        const auto at_a = static_cast<std::size_t>(r * adapter.in + i),
                   at_b = static_cast<std::size_t>(o * adapter.rank + r);
        d_a[at_a] += d * adapter.b[at_b];
        d_b[at_b] += d * adapter.a[at_a];
      }
    }
  }
  return {d_a, d_b};
}

using Reference = std::function<reference_training::LossSum(const Tensors& weights, const TokenData& data,
                                                            Tensors* gradients)>;

/// Compares loss and gradients of one micro-batch with fp64 results for the merged weights.
void expect_gradients(const LanguageModel& model, const Reference& reference, bool split = false) {
  Config config = lora_config(1, model.shape().tied_head ? std::vector<std::string>{"all-linear"}
                                                         : std::vector<std::string>{"all-linear", "lm_head"});
  config.vocabulary_chunk = 8;
  on_ranks(1, model.spec(sequence), config, [&](Engine& engine) {
    write_adapters(engine);
    TokenData data(sequence, model.shape().vocabulary, true);
    data.draw(0, 2);
    const Tensors held = read_all(engine);
    const std::vector<Adapter> adapters = adapters_of(engine, held);
    ASSERT_FALSE(adapters.empty());
    Tensors merged = held;
    for (const Adapter& adapter : adapters) {
      merge(adapter, merged.at(adapter.weight));
      merged.erase(adapter.a_name);
      merged.erase(adapter.b_name);
    }
    Tensors wanted = reference_training::zeros(merged);
    const auto loss = reference(merged, data, &wanted);
    split ? weights_last(model, engine, data.batch()) : model.forward_backward(engine, data.batch());
    for (const Adapter& adapter : adapters) {
      const auto [d_a, d_b] = unmerged(adapter, wanted.at(adapter.weight));
      const auto expect = [&](const std::string& name, const Tensor& gradient) {
        const std::vector<float> read = engine.read_gradient(name);
        Tensor scaled(gradient);
        for (double& value : scaled) value /= static_cast<double>(loss.tokens);
        EXPECT_LE(relative_distance({read.begin(), read.end()}, scaled), 1e-5) << name;
      };
      expect(adapter.a_name, d_a);
      expect(adapter.b_name, d_b);
    }
    const StepResult result = engine.step();
    EXPECT_NEAR(result.loss, loss.sum / static_cast<double>(loss.tokens), 1e-5 * result.loss);
  });
}

Reference reference_of(const LlamaConfig& config) {
  return [config](const Tensors& weights, const TokenData& data, Tensors* gradients) {
    return reference_training::llama(config, weights, {data.tokens, data.targets, sequence}, gradients);
  };
}

GptConfig gpt_without_dropout() {
  GptConfig config = tiny_gpt();
  config.embedding_dropout = config.attention_dropout = config.residual_dropout = 0;
  return config;
}

TEST(LoraGradients, OfEveryLinearAgreeWithTheMergedModelInFp64) {
  for (const LlamaKind kind : all_kinds) {
    LlamaConfig config = tiny_llama(kind);
    config.tied = false;
    SCOPED_TRACE(std::string(config.architecture()));
    expect_gradients(Llama(config), reference_of(config));
  }
  const GptConfig gpt = gpt_without_dropout();
  expect_gradients(Gpt(gpt), [&](const Tensors& weights, const TokenData& data, Tensors* gradients) {
    return reference_training::gpt(gpt, weights, data.tokens, data.targets, sequence, gradients);
  });
}

/// The head computes its vocabulary in blocks of 4096 columns.
TEST(LoraGradients, OfAHeadOfSeveralBlocksAgreeWithFp64) {
  LlamaConfig config = tiny_llama(LlamaKind::llama);
  config.tied = false;
  config.vocabulary = 4133;
  expect_gradients(Llama(config), reference_of(config));
  const Llama model(config);
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    Config training = lora_config(1, {"lm_head"});
    training.precision.compute = training.precision.communication = dtype;
    training.lora.dropout = 0.3;
    const GptRun whole = train_model(1, model, training, 2, sequence);
    training.vocabulary_chunk = 4096;
    EXPECT_EQ(train_model(1, model, training, 2, sequence).digest, whole.digest) << name_of(dtype);
  }
}

TEST(LoraGradients, AreTheSameWhenWeightGradientsAreLeftForLater) {
  LlamaConfig config = tiny_llama(LlamaKind::llama);
  config.tied = false;
  expect_gradients(Llama(config), reference_of(config), true);
}

/// The adapter of a tied head does not change the embedding: the model computes the same as one with an
/// untied head W + scale B A.
TEST(LoraGradients, ATiedHeadsAdapterLeavesTheEmbedding) {
  const LlamaConfig tied = tiny_llama(LlamaKind::qwen3);
  LlamaConfig untied = tied;
  untied.tied = false;
  on_ranks(1, Llama(tied).spec(sequence), lora_config(1, {"lm_head"}), [&](Engine& engine) {
    write_adapters(engine);
    TokenData data(sequence, tied.vocabulary, true);
    data.draw(0, 2);
    Tensors weights = read_all(engine);
    const std::vector<Adapter> adapters = adapters_of(engine, weights);
    ASSERT_EQ(adapters.size(), 1u);
    EXPECT_EQ(adapters[0].b_name, "lm_head.lora_B.weight");
    weights["lm_head.weight"] = weights.at(adapters[0].weight);
    merge(adapters[0], weights["lm_head.weight"]);
    Tensors wanted = reference_training::zeros(weights);
    const auto loss = reference_of(untied)(weights, data, &wanted);
    Llama(tied).forward_backward(engine, data.batch());
    const auto [d_a, d_b] = unmerged(adapters[0], wanted.at("lm_head.weight"));
    const std::vector<float> a = engine.read_gradient(adapters[0].a_name),
                             b = engine.read_gradient(adapters[0].b_name);
    const auto mean = [&](Tensor sum) {
      for (double& value : sum) value /= static_cast<double>(loss.tokens);
      return sum;
    };
    EXPECT_LE(relative_distance({a.begin(), a.end()}, mean(d_a)), 1e-5);
    EXPECT_LE(relative_distance({b.begin(), b.end()}, mean(d_b)), 1e-5);
    EXPECT_NEAR(engine.step().loss, loss.sum / static_cast<double>(loss.tokens), 1e-5);
  });
}

/// With dropout a gradient belongs to the loss with the same masks.
TEST(LoraGradients, WithDropoutAreTheSlopeOfTheLoss) {
  const Llama model(tiny_llama(LlamaKind::qwen3));
  Config config = lora_config(1, {"q_proj", "down_proj", "lm_head"});
  config.lora.dropout = 0.4;
  const auto loss_at = [&](const std::string& name, std::size_t at, float by, std::vector<float>* gradient) {
    double loss = 0;
    on_ranks(1, model.spec(sequence), config, [&](Engine& engine) {
      write_adapters(engine);
      if (!name.empty()) {
        std::vector<float> values = engine.read_weight(name);
        values[at] += by;
        engine.write_weight(name, values);
      }
      TokenData data(sequence, model.shape().vocabulary, true);
      data.draw(0, 2);
      model.forward_backward(engine, data.batch());
      if (gradient != nullptr) *gradient = engine.read_gradient(name);
      loss = engine.step().loss;
    });
    return loss;
  };
  for (const char* name :
       {"model.layers.0.self_attn.q_proj.lora_A.weight", "model.layers.1.mlp.down_proj.lora_A.weight",
        "model.layers.0.mlp.down_proj.lora_B.weight", "lm_head.lora_A.weight", "lm_head.lora_B.weight"}) {
    std::vector<float> gradient;
    (void)loss_at(name, 0, 0, &gradient);
    const auto steepest = static_cast<std::size_t>(
        std::max_element(gradient.begin(), gradient.end(),
                         [](float x, float y) { return std::abs(x) < std::abs(y); }) -
        gradient.begin());
    constexpr float h = 0.02f;
    const double slope =
        (loss_at(name, steepest, h, nullptr) - loss_at(name, steepest, -h, nullptr)) / (2 * h);
    EXPECT_NEAR(gradient[steepest], slope, 2e-2 * std::abs(slope)) << name;
  }
}

TEST(LoraTraining, BeginsAsTheModelWithoutAdaptersAndLearns) {
  const Llama model(tiny_llama(LlamaKind::qwen3));
  Config config = lora_config(1, {"all-linear", "lm_head"});
  config.optimizer.learning_rate = 0.01;
  Config plain = config;
  plain.lora = {};
  const GptRun with = train_model(1, model, config, 150, sequence),
               without = train_model(1, model, plain, 1, sequence);
  EXPECT_EQ(with.losses.front(), without.losses.front());
  EXPECT_LT(with.losses.back(), with.losses.front() - 0.2);
}

/// Settings that may change the places of state and its transfers, but no bit.
TEST(LoraTraining, StagesTiersAndRecomputationGiveTheSameBits) {
  int point = 0;
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    for (int ranks = 1; ranks <= 3; ++ranks) {
      for (const bool gpt : {false, true}) {
        std::unique_ptr<const LanguageModel> model = std::make_unique<Llama>(tiny_llama(LlamaKind::qwen3));
        if (gpt) model = std::make_unique<Gpt>(tiny_gpt());
        Config config = lora_config(ranks, {"all-linear", "lm_head"});
        config.accumulation_steps = 2;
        config.micro_batch_size = 1;
        config.gradient_clipping = 0.5;
        config.reduction = ReductionPolicy::micro_batch;
        config.lora.dropout = 0.2;
        config.precision.compute = config.precision.communication = dtype;
        const GptRun wanted = train_model(ranks, *model, config, 3, sequence, true);
        for (const int stage : {1, 2, 3}) {
          for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
            if (!test::swept(point++, 5)) continue;
            Config other = config;
            other.stage = stage;
            other.activation_checkpointing = point % 2 == 0;
            other.checkpoint_every = 2;
            other.offload.optimizer = tier;
            if (stage == 3) other.offload.parameters = tier;
            other.offload.nvme_path = std::filesystem::temp_directory_path().string();
            const GptRun run = train_model(ranks, *model, other, 3, sequence, true);
            const std::string trace =
                fmt::format("{}, {} ranks, {}, stage {}, {}, recomputed {}", model->architecture(), ranks,
                            name_of(dtype), stage, name_of(tier), other.activation_checkpointing);
            EXPECT_EQ(run.digest, wanted.digest) << trace;
            EXPECT_EQ(run.losses, wanted.losses) << trace;
          }
        }
      }
    }
  }
}

TEST(LoraTraining, AnyNumberOfRanksAgreesWithOne) {
  const Llama model(tiny_llama(LlamaKind::qwen3));
  Config config = lora_config(1);
  config.lora.dropout = 0.3;
  config.train_batch_size = config.micro_batch_size = 6;
  const GptRun one = train_model(1, model, config, 4, sequence, true);
  for (const int ranks : {2, 3}) {
    config.micro_batch_size = 6 / ranks;
    const GptRun run = train_model(ranks, model, config, 4, sequence, true);
    for (std::size_t i = 0; i < one.losses.size(); ++i) EXPECT_NEAR(run.losses[i], one.losses[i], 1e-5);
  }
}

TEST(LoraTraining, DropoutIsOffInEvaluationAndWantsSamples) {
  const Llama model(tiny_llama(LlamaKind::qwen3));
  const auto evaluated = [&](double dropout) {
    double loss = 0;
    Config config = lora_config(1);
    config.lora.dropout = dropout;
    on_ranks(1, model.spec(sequence), config, [&](Engine& engine) {
      write_adapters(engine);
      TokenData data(sequence, model.shape().vocabulary, true);
      data.draw(0, 1);
      engine.begin_evaluation();
      model.evaluate(engine, data.batch());
      loss = engine.end_evaluation().loss;
    });
    return loss;
  };
  EXPECT_EQ(evaluated(0.5), evaluated(0));
  Config config = lora_config(1);
  config.lora.dropout = 0.5;
  on_ranks(1, model.spec(sequence), config, [&](Engine& engine) {
    engine.begin_micro_batch();
    const GatheredUnit unit = engine.gather({1});
    const StepTensors memory(engine, Category::activations, "test",
                             {{DataType::float32, {2, model.config().width}},
                              {DataType::float32, {2, model.config().query_width()}}});
    try {
      linear_forward(engine, unit, {.weight = 1, .layout = Linear::Layout::out_in}, memory[0], memory[1]);
      FAIL() << "there are no samples";
    } catch (const InvalidArgument& refused) {
      EXPECT_THAT(refused.message(), HasSubstr("tranche.lora.dropout is keyed by samples"));
    }
  });
}

/// Frozen weights have 0 bytes of gradient and optimizer state.
TEST(LoraMemory, FrozenWeightsHaveNoGradientAndNoOptimizerState) {
  const Llama model(tiny_llama(LlamaKind::qwen3));
  const Config config = lora_config(1, {"q_proj", "v_proj"});
  const LlamaConfig& sizes = model.config();
  const std::int64_t adapters =
      sizes.layers * 3 * (2 * sizes.width + sizes.query_width() + sizes.key_value_width());
  on_ranks(1, model.spec(sequence), config, [&](Engine& engine) {
    TokenData data(sequence, model.shape().vocabulary, true);
    for (int step = 0; step < 3; ++step) {
      data.draw(2 * step, 2);
      model.forward_backward(engine, data.batch());
      (void)engine.step();
    }
    const StateBytes bytes = engine.state_bytes();
    // Flat buffers align their tensors.
    const std::int64_t aligned = adapters + engine.state_bytes().padding;
    EXPECT_GE(bytes.optimizer, 2 * 4 * adapters);
    EXPECT_LE(bytes.optimizer, 2 * 4 * aligned);
    EXPECT_LE(bytes.gradients, 4 * aligned);
    const TierAccount account = engine.runtime().ledger().account(Tier::device);
    EXPECT_LE(account.category_peak[Category::gradients], bytes.gradients) << "no scratch counts either";
    EXPECT_EQ(account.category_peak[Category::optimizer], bytes.optimizer);
    for (const UnitSpec& unit : engine.model().units()) {
      for (const TensorSpec& tensor : unit.tensors) {
        const bool adapter = tensor.name.find(".lora_") != std::string::npos;
        EXPECT_EQ(engine.frozen(tensor.name), !adapter) << tensor.name;
      }
    }
  });
}

/// A folder that is removed with the test.
class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "tranche-lora-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = pattern;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string operator/(const char* name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

struct Digests {
  kernels::Digest weights, state;
  friend bool operator==(const Digests&, const Digests&) = default;
};

TEST(LoraCheckpoints, AreLoadedByAnyNumberOfRanksStagesAndTiers) {
  const Llama model(tiny_llama(LlamaKind::qwen3));
  const Folder folder;
  const auto train = [&](Engine& engine, int steps) {
    TokenData data(sequence, model.shape().vocabulary, true);
    const Config& used = engine.config();
    for (int step = 0; step < steps; ++step) {
      data.draw(step * used.train_batch_size + engine.runtime().rank() * used.micro_batch_size,
                used.micro_batch_size);
      model.forward_backward(engine, data.batch());
      (void)engine.step();
    }
  };
  for (const char* name : {"base", "other"}) {
    Config plain = plain_config(2);
    plain.seed = name[0] == 'b' ? 1 : 2;
    on_ranks(1, model.spec(sequence), plain,
             [&](Engine& engine) { (void)engine.save(folder / name, {.wait = true}); });
  }
  Digests wanted;
  Config config = lora_config(2, {"all-linear", "lm_head"});
  config.stage = 3;
  on_ranks(2, model.spec(sequence), config, [&](Engine& engine) {
    const LoadResult base = engine.load(folder / "base", {.weights_only = true});
    EXPECT_THAT(base.notes, ::testing::IsEmpty());
    train(engine, 2);
    (void)engine.save(folder / "run", {.wait = true});
    const Digests found{engine.weights_digest(), engine.state_digest()};
    if (engine.runtime().rank() == 0) wanted = found;
  });
  int point = 0;
  for (const int ranks : {1, 2, 3}) {
    for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
      if (!test::swept(point++)) continue;
      Config other = lora_config(ranks, {"all-linear", "lm_head"});
      other.seed = 77;  // no drawn value is the same
      other.stage = tier == OffloadTier::none ? ranks - 1 : 3;
      other.offload.optimizer = tier;
      other.offload.parameters = other.stage == 3 ? tier : OffloadTier::none;
      other.offload.nvme_path = std::filesystem::temp_directory_path().string();
      on_ranks(ranks, model.spec(sequence), other, [&](Engine& engine) {
        EXPECT_EQ(engine.load(folder / "run").step, 2);
        const Digests found{engine.weights_digest(), engine.state_digest()};
        EXPECT_EQ(found, wanted) << ranks << " ranks, " << name_of(tier);
        train(engine, 1);
        (void)engine.save(folder / "again", {.wait = true});
      });
    }
  }
  const auto problem = [&](const Config& of, const LoadOptions& options, const char* name = "run") {
    std::string text;
    on_ranks(1, model.spec(sequence), of, [&](Engine& engine) {
      try {
        const LoadResult loaded = engine.load(folder / name, options);
        for (const std::string& note : loaded.notes) text += note + "\n";
      } catch (const CheckpointError& error) {
        text = error.message();
      }
    });
    return text;
  };
  const Config one = lora_config(1, {"all-linear", "lm_head"});
  EXPECT_THAT(problem(one, {.base = folder / "other"}),
              HasSubstr("holds adapters that were trained beside another base"));
  Config bf16 = one;
  bf16.precision.compute = bf16.precision.communication = DataType::bfloat16;
  EXPECT_THAT(problem(bf16, {}), Not(HasSubstr("base")))
      << "it is compared in the dtype that it was recorded in";
  EXPECT_THAT(problem(plain_config(2), {}),
              HasSubstr("holds adapters alone: give its tranche.lora, or export"));
  EXPECT_THAT(problem(one, {}, "base"), HasSubstr("holds no adapters: take its weights as their base"));
  EXPECT_THAT(problem(one, {.base = folder / "run"}), HasSubstr("holds adapters alone; export it merged"));
  Config fewer = lora_config(1, {"q_proj"});
  EXPECT_THAT(problem(fewer, {}), HasSubstr("its adapters are others than those of tranche.lora"));
  std::filesystem::rename(folder / "base", folder / "moved");
  EXPECT_THAT(problem(one, {}), HasSubstr("where it lies elsewhere now, give --base"));
  EXPECT_THAT(problem(one, {.base = folder / "moved"}), Not(HasSubstr("base")));
}

std::string refusal(const ModelSpec& spec, const LoraConfig& lora) {
  try {
    (void)with_adapters(spec, lora);
  } catch (const ConfigurationError& refused) {
    return refused.message();
  }
  return "";
}

TEST(LoraConfig, ScalesAsPeftDoes) {
  EXPECT_EQ((LoraConfig{.rank = 8, .alpha = 16}).scale(), 2);
  EXPECT_EQ((LoraConfig{.rank = 16, .alpha = 16, .rank_scaled = true}).scale(), 4);
  EXPECT_EQ((LoraConfig{.rank = 5}).scale(), 1);
}

TEST(LoraConfig, RefusesByName) {
  const ModelSpec llama = Llama(tiny_llama(LlamaKind::qwen3)).spec(sequence),
                  gpt = Gpt(tiny_gpt()).spec(sequence);
  EXPECT_EQ(refusal(llama, {.rank = 2, .targets = {"q_prj"}}),
            "tranche.lora.targets: 'q_prj' matches no linear layer; did you mean 'q_proj'?");
  EXPECT_EQ(
      refusal(gpt, {.rank = 2, .targets = {"wte"}}),
      "tranche.lora.targets: 'wte' is an embedding, and adapters are for linear layers; the head that is "
      "tied to it is 'lm_head'");
  EXPECT_EQ(refusal(gpt, {.rank = -1}), "tranche.lora.rank: -1 is not between 0 (no adapters) and 65536");
  EXPECT_EQ(refusal(gpt, {.rank = 1, .dropout = 1}), "tranche.lora.dropout: 1 is not in [0, 1)");
  EXPECT_EQ(refusal(gpt, {.rank = 1, .alpha = -2}), "tranche.lora.alpha: -2 is not a positive number");
  EXPECT_EQ(refusal(gpt, {.rank = 1, .targets = {}}), "tranche.lora.targets: names no linear layer");
  ModelSpec bare;
  bare.add_unit({.name = "u", .tensors = {{"u.weight", {2, 2}, Initializer::ones()}}});
  EXPECT_EQ(refusal(bare, {.rank = 1}),
            "tranche.lora: the model names no linear layers (TensorSpec::linear), so there is nothing to add "
            "adapters to");
}

/// The number of a model's tensors that Muon updates whole, and of the matrices in them.
std::pair<int, int> hidden_matrices(const ModelSpec& spec) {
  std::pair<int, int> found{0, 0};
  for (const UnitSpec& unit : spec.units()) {
    for (const TensorSpec& tensor : unit.tensors) {
      if (tensor.matrices == 0 || tensor.frozen) continue;
      ++found.first;
      found.second += tensor.matrices;
    }
  }
  return found;
}

TEST(HiddenMatrices, AreThoseOfBlocksAndLorasFactors) {
  const ModelSpec gpt = Gpt(tiny_gpt()).spec(sequence);
  const auto blocks = static_cast<int>(tiny_gpt().layers);
  EXPECT_EQ(hidden_matrices(gpt), std::pair(4 * blocks, 6 * blocks));
  const ModelSpec llama = Llama(tiny_llama(LlamaKind::llama)).spec(sequence);
  const auto of_llama = static_cast<int>(7 * tiny_llama(LlamaKind::llama).layers);
  EXPECT_EQ(hidden_matrices(llama), std::pair(of_llama, of_llama));
  EXPECT_EQ(hidden_matrices(with_adapters(gpt, {.rank = 2, .targets = {"c_attn"}})),
            std::pair(2 * blocks, 2 * blocks));
}

TEST(LoraConfig, TargetsAreNamesEndsAndPatterns) {
  const ModelSpec gpt = Gpt(tiny_gpt()).spec(sequence);
  const auto count = [&](std::vector<std::string> targets) {
    std::size_t adapters = 0;
    const ModelSpec adapted = with_adapters(gpt, {.rank = 2, .targets = std::move(targets)});
    for (const UnitSpec& unit : adapted.units()) adapters += unit.adapters.size();
    return adapters;
  };
  const auto layers = static_cast<std::size_t>(tiny_gpt().layers);
  EXPECT_EQ(count({"all-linear"}), 4 * layers);
  EXPECT_EQ(count({"c_attn"}), layers);
  EXPECT_EQ(count({"c_proj"}), 2 * layers) << "attention's and the MLP's";
  EXPECT_EQ(count({"mlp.c_proj"}), layers);
  EXPECT_EQ(count({"transformer.h.1.*"}), 4u);
  EXPECT_EQ(count({"lm_head"}), 1u);
  EXPECT_EQ(count({"all-linear", "lm_head", "c_attn"}), 4 * layers + 1);
}

TEST(LoraConfig, IsReadRefusedAndWritten) {
  const Config read = parse_config(
      R"({"tranche": {"lora": {"rank": 8, "alpha": 16, "dropout": 0.1, "targets": ["q_proj"], "rslora": true}}})",
      1);
  EXPECT_EQ(read.lora,
            (LoraConfig{.rank = 8, .alpha = 16, .dropout = 0.1, .rank_scaled = true, .targets = {"q_proj"}}));
  EXPECT_EQ(parse_config(read.to_json(), 1).lora, read.lora);
  const auto refused = [](const std::string& lora) {
    try {
      (void)parse_config(R"({"tranche": {"lora": {)" + lora + "}}}", 1);
    } catch (const ConfigurationError& problem) {
      return problem.message();
    }
    return std::string();
  };
  EXPECT_THAT(refused(R"("rank": 4, "load_in_4bit": true)"),
              HasSubstr("QLoRA (a base in 4 bits) is not part"));
  EXPECT_THAT(refused(R"("rank": 4, "load_in_8bit": true)"),
              HasSubstr("QLoRA (a base in 8 bits) is not part"));
  EXPECT_THAT(refused(R"("rank": 4, "quantization": "nf4")"),
              HasSubstr("QLoRA (a quantised base) is not part"));
  EXPECT_THAT(refused(R"("rank": 4, "use_dora": true)"),
              HasSubstr("DoRA (weight-decomposed adapters) is not"));
  EXPECT_THAT(refused(R"("alpha": 4)"), HasSubstr("tranche.lora: has no rank"));
  Config both = lora_config(1);
  both.frozen = {"*.bias"};
  try {
    validate_config(both, 1);
    FAIL() << "both freeze";
  } catch (const ConfigurationError& problem) {
    EXPECT_THAT(problem.message(),
                HasSubstr("tranche.frozen: with tranche.lora everything but the adapters"));
  }
}

}  // namespace
}  // namespace tranche::models
