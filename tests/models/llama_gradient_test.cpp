// Compares the Llama family's gradients with fp64, and tests settings that must not change a bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "own_schedule.h"
#include "reference_llama.h"
#include "tiny_llama.h"
#include "training_fixture.h"
#include "tranche/core/error.h"
#include "tranche/models/llama.h"

namespace tranche::models {
namespace {

using reference_training::Tensors;

constexpr std::int64_t row_tokens = 13;

/// Weights in which no norm is one and no bias zero.
Tensors moved_weights(const LlamaConfig& model, double by = 0.3) {
  Tensors weights;
  std::uint64_t subject = 0;
  const ModelSpec spec = Llama(model).spec(row_tokens);
  for (const auto& unit : spec.units()) {
    for (const auto& tensor : unit.tensors) {
      const RandomKey key{.seed = 5, .subject = subject++};
      const double middle = tensor.initializer.kind == Initializer::Kind::constant ? tensor.initializer.a : 0;
      auto& values = weights[tensor.name];
      for (std::int64_t i = 0; i < tensor.shape.elements(); ++i) {
        values.push_back(static_cast<float>(middle + by * random_normal(key, static_cast<std::uint64_t>(i))));
      }
    }
  }
  return weights;
}

/// Documents in the rows of a batch: each begins at a multiple of 5, where positions restart.
struct Documents {
  std::vector<std::int32_t> begin, positions;
  explicit Documents(std::int64_t rows) {
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto t = static_cast<std::int32_t>(row % row_tokens);
      begin.push_back(t - t % 5);
      positions.push_back(t % 5);
    }
  }
};

struct LlamaGradients {
  Tensors gradients;
  double loss = 0;
};

/// The gradients of one step over samples 0 ... 5, three per micro-batch.
LlamaGradients engine_gradients_of(const LlamaConfig& model, const Tensors& weights, Config config,
                                   bool documents = false) {
  LlamaGradients result;
  config.accumulation_steps = 2;
  config.micro_batch_size = 3;
  config.train_batch_size = 6;
  const Llama llama(model);
  on_ranks(1, llama.spec(row_tokens), config, [&](Engine& engine) {
    for (const auto& [name, values] : weights) {
      engine.write_weight(name, std::vector<float>(values.begin(), values.end()));
    }
    TokenData data(row_tokens, model.vocabulary, true);
    const Documents parts(3 * row_tokens);
    for (int m = 0; m < 2; ++m) {
      data.draw(3 * m, 3);
      TokenBatch batch = data.batch();
      if (documents) {
        batch.document_begin = {parts.begin.data(), DataType::int32, batch.tokens.shape};
        batch.positions = {parts.positions.data(), DataType::int32, batch.tokens.shape};
      }
      llama.forward_backward(engine, batch);
    }
    result.gradients = read_all(engine, true);
    result.loss = engine.step().loss;
  });
  return result;
}

LlamaGradients reference_gradients_of(const LlamaConfig& model, const Tensors& weights,
                                      bool documents = false) {
  LlamaGradients result{reference_training::zeros(weights)};
  reference_training::LossSum total;
  TokenData data(row_tokens, model.vocabulary, true);
  const Documents parts(3 * row_tokens);
  for (int m = 0; m < 2; ++m) {
    data.draw(3 * m, 3);
    reference_training::LlamaRows rows{data.tokens, data.targets, row_tokens};
    if (documents) rows.document_begin = parts.begin, rows.positions = parts.positions;
    const auto loss = reference_training::llama(model, weights, rows, &result.gradients);
    total.sum += loss.sum;
    total.tokens += loss.tokens;
  }
  for (auto& [name, values] : result.gradients) {
    for (auto& value : values) value /= static_cast<double>(total.tokens);
  }
  result.loss = total.sum / static_cast<double>(total.tokens);
  return result;
}

void expect_gradients_near(const LlamaGradients& actual, const LlamaGradients& wanted, double tolerance) {
  ASSERT_EQ(actual.gradients.size(), wanted.gradients.size());
  for (const auto& [name, values] : wanted.gradients) {
    EXPECT_LE(relative_distance(actual.gradients.at(name), values), tolerance) << name;
  }
  EXPECT_NEAR(actual.loss, wanted.loss, tolerance / 10 * wanted.loss);
}

TEST(ReferenceLlama, BackwardAgreesWithFiniteDifferences) {
  for (const LlamaKind kind : all_kinds) {
    const LlamaConfig model = tiny_llama(kind);
    SCOPED_TRACE(std::string(model.architecture()));
    TokenData data(row_tokens, model.vocabulary, true);
    data.draw(0, 2);
    const Documents parts(2 * row_tokens);
    const reference_training::LlamaRows rows{data.tokens, data.targets, row_tokens, parts.begin,
                                             parts.positions};
    Tensors weights = moved_weights(model);
    Tensors gradients = reference_training::zeros(weights);
    (void)reference_training::llama(model, weights, rows, &gradients);
    const auto loss_at = [&](double& weight, double value) {
      const double kept = std::exchange(weight, value);
      const double loss = reference_training::llama(model, weights, rows, nullptr).sum;
      weight = kept;
      return loss;
    };
    // Central differences: the error is h^2 times a third derivative plus 1e-16 * loss / h, about 1e-9 here.
    constexpr double h = 1e-5;
    for (auto& [name, values] : weights) {
      const RandomKey key{.seed = 6, .subject = values.size()};
      for (std::uint64_t draw = 0; draw < 3; ++draw) {
        const std::size_t i = random_bits(key, draw) % values.size();
        const double slope =
            (loss_at(values[i], values[i] + h) - loss_at(values[i], values[i] - h)) / (2 * h);
        EXPECT_NEAR(gradients[name][i], slope, 1e-6 * std::max(1.0, std::abs(slope)))
            << name << " element " << i;
      }
    }
  }
}

TEST(Llama, GradientsAgreeWithTheReference) {
  for (const LlamaKind kind : all_kinds) {
    for (const bool documents : {false, true}) {
      const LlamaConfig model = tiny_llama(kind);
      SCOPED_TRACE(std::string(model.architecture()) + (documents ? ", documents" : ""));
      const Tensors weights = moved_weights(model);
      // fp32 sums of up to 78 rows and 61 columns have errors of a few 2^-24 each, together well below 1e-5
      // in norm.
      expect_gradients_near(engine_gradients_of(model, weights, plain_config(6), documents),
                            reference_gradients_of(model, weights, documents), 1e-5);
    }
  }
}

TEST(Llama, GradientsOf16BitsAgreeWithTheReferenceToTheirPrecision) {
  // A 16-bit activation has a relative error of 2^-9 (bf16) or 2^-12 (fp16). A dozen consecutive roundings,
  // in forward and again in backward, added up to at most 0.037 and 0.0068 of a tensor's norm when measured,
  // in Qwen3: a norm of six elements increases the relative error of its input.
  for (const LlamaKind kind : all_kinds) {
    const LlamaConfig model = tiny_llama(kind);
    const Tensors weights = moved_weights(model, 0.1);
    const auto wanted = reference_gradients_of(model, weights);
    for (const auto& [dtype, tolerance] : {std::pair{DataType::bfloat16, 0.05}, {DataType::float16, 0.01}}) {
      SCOPED_TRACE(std::string(model.architecture()) + " in " + std::string(name_of(dtype)));
      auto config = plain_config(6);
      config.precision.compute = dtype;
      config.loss_scaling = dtype == DataType::float16;
      expect_gradients_near(engine_gradients_of(model, weights, config), wanted, tolerance);
    }
  }
}

TEST(Llama, CheckpointingAndVocabularyChunksGiveTheSameBits) {
  for (const LlamaKind kind : {LlamaKind::llama, LlamaKind::qwen3}) {
    const LlamaConfig model = tiny_llama(kind);
    const Tensors weights = moved_weights(model);
    for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
      auto config = plain_config(6);
      config.precision.compute = config.precision.communication = dtype;
      const auto saved = engine_gradients_of(model, weights, config, true);
      for (const int every : {1, 2}) {
        config.activation_checkpointing = true;
        config.checkpoint_every = every;
        config.vocabulary_chunk = 1;
        const auto recomputed = engine_gradients_of(model, weights, config, true);
        EXPECT_EQ(recomputed.gradients, saved.gradients) << name_of(dtype) << " every " << every;
        EXPECT_EQ(recomputed.loss, saved.loss);
      }
    }
  }
}

TEST(Llama, WeightGradientsThatArePutOffHaveTheSameBits) {
  for (const LlamaKind kind : all_kinds) {
    const Llama model(tiny_llama(kind));
    for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
      const auto digest = [&](bool split) {
        Config config = plain_config(2);
        config.precision.compute = config.precision.communication = dtype;
        kernels::Digest result;
        on_ranks(1, model.spec(row_tokens), config, [&](Engine& engine) {
          TokenData data(row_tokens, model.config().vocabulary, true);
          for (int step = 0; step < 3; ++step) {
            data.draw(2 * step, 2);
            split ? weights_last(model, engine, data.batch()) : model.forward_backward(engine, data.batch());
            (void)engine.step();
          }
          result = engine.weights_digest();
        });
        return result;
      };
      EXPECT_EQ(digest(true), digest(false)) << model.architecture() << " " << name_of(dtype);
    }
  }
}

TEST(Llama, FrozenTensorsLeaveTheOtherGradientsAlone) {
  const LlamaConfig model = tiny_llama(LlamaKind::qwen3);
  const Tensors weights = moved_weights(model);
  const auto all = engine_gradients_of(model, weights, plain_config(6));
  auto config = plain_config(6);
  config.frozen = {"*.q_norm.weight", "*.mlp.up_proj.weight", "model.layers.0.*", "model.norm.weight"};
  Tensors learnt;
  const Llama llama(model);
  config.accumulation_steps = 2;
  config.micro_batch_size = 3;
  on_ranks(1, llama.spec(row_tokens), config, [&](Engine& engine) {
    for (const auto& [name, values] : weights) {
      engine.write_weight(name, std::vector<float>(values.begin(), values.end()));
    }
    TokenData data(row_tokens, model.vocabulary, true);
    for (int m = 0; m < 2; ++m) {
      data.draw(3 * m, 3);
      llama.forward_backward(engine, data.batch());
    }
    for (const char* name : {"model.embed_tokens.weight", "model.layers.1.mlp.gate_proj.weight",
                             "model.layers.1.self_attn.k_norm.weight"}) {
      const auto values = engine.read_gradient(name);
      EXPECT_EQ(Tensors::mapped_type(values.begin(), values.end()), all.gradients.at(name)) << name;
    }
    (void)engine.step();
  });
}

TEST(Llama, SpecHasTheNamesAndShapesOfHuggingFace) {
  const auto listed = [](const UnitSpec& unit) {
    std::string text;
    for (const auto& tensor : unit.tensors) text += tensor.name + tensor.shape.to_string() + "\n";
    return text;
  };
  const auto spec = Llama(tiny_llama(LlamaKind::llama)).spec(row_tokens);
  ASSERT_EQ(spec.units().size(), 4u);
  EXPECT_EQ(spec.unit({1}).name, "layers.0");
  EXPECT_EQ(listed(spec.unit({0})), "model.embed_tokens.weight[61, 24]\n");
  EXPECT_EQ(listed(spec.unit({3})), "model.norm.weight[24]\nlm_head.weight[61, 24]\n");
  EXPECT_EQ(listed(spec.unit({2})),
            "model.layers.1.input_layernorm.weight[24]\n"
            "model.layers.1.self_attn.q_proj.weight[24, 24]\n"
            "model.layers.1.self_attn.q_proj.bias[24]\n"
            "model.layers.1.self_attn.k_proj.weight[12, 24]\n"
            "model.layers.1.self_attn.k_proj.bias[12]\n"
            "model.layers.1.self_attn.v_proj.weight[12, 24]\n"
            "model.layers.1.self_attn.v_proj.bias[12]\n"
            "model.layers.1.self_attn.o_proj.weight[24, 24]\n"
            "model.layers.1.self_attn.o_proj.bias[24]\n"
            "model.layers.1.post_attention_layernorm.weight[24]\n"
            "model.layers.1.mlp.gate_proj.weight[37, 24]\n"
            "model.layers.1.mlp.gate_proj.bias[37]\n"
            "model.layers.1.mlp.up_proj.weight[37, 24]\n"
            "model.layers.1.mlp.up_proj.bias[37]\n"
            "model.layers.1.mlp.down_proj.weight[24, 37]\n"
            "model.layers.1.mlp.down_proj.bias[24]\n");
  const auto tied = Llama(tiny_llama(LlamaKind::qwen3)).spec(row_tokens);
  EXPECT_EQ(listed(tied.unit({0})), "model.embed_tokens.weight[61, 24]\nmodel.norm.weight[24]\n");
  EXPECT_EQ(tied.unit({0}).tensors[0].aliases, std::vector<std::string>{"lm_head.weight"});
  EXPECT_EQ(tied.unit({0}).uses_per_micro_batch, 2);
  EXPECT_THAT(listed(tied.unit({1})), ::testing::HasSubstr("model.layers.0.self_attn.q_norm.weight[6]\n"
                                                           "model.layers.0.self_attn.k_norm.weight[6]\n"));
}

TEST(Llama, SpecHoldsTheParametersAndOperationsThatTheFormulasCount) {
  std::vector<LlamaConfig> configs;
  for (const LlamaKind kind : all_kinds) configs.push_back(tiny_llama(kind));
  for (const auto& name : LlamaConfig::preset_names()) configs.push_back(LlamaConfig::preset(name));
  for (const auto& config : configs) {
    const ModelSpec spec = Llama(config).spec(32);
    EXPECT_EQ(spec.parameters(), config.parameters()) << config.to_json();
    EXPECT_NEAR(spec.flops_per_token, config.flops_per_token(32), 1e-12 * spec.flops_per_token);
  }
}

}  // namespace
}  // namespace tranche::models
