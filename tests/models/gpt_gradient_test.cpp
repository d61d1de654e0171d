// Compares the GPT's gradients with those of the reference, and tests the reference.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "models/language_head.h"
#include "tests/core/rounds.h"
#include "training_fixture.h"
#include "tranche/device/device.h"
#include "tranche/kernels/cross_entropy.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::models {
namespace {

using reference_training::Tensors;

struct Gradients {
  Tensors gradients;
  double loss = 0;
};

/// The gradients of one step over samples 0 ... 5, three per micro-batch. The weights differ from their
/// initial values (biases are not zero), so that no factor is zero or one.
Gradients engine_gradients(const GptConfig& model, Config config, Tensors* weights = nullptr) {
  Gradients result;
  config.accumulation_steps = 2;
  config.micro_batch_size = 3;
  config.train_batch_size = 6;
  on_ranks(1, Gpt::spec(model, 13), config, [&](Engine& engine) {
    std::uint64_t subject = 0;
    for (const auto& [name, values] : read_all(engine)) {
      const RandomKey key{.seed = 3, .subject = subject++};
      std::vector<float> moved(values.begin(), values.end());
      for (std::size_t i = 0; i < moved.size(); ++i) moved[i] += 0.1f * random_normal(key, i);
      engine.write_weight(name, moved);
    }
    if (weights != nullptr) *weights = read_all(engine);
    TokenData data(13, model.vocabulary, true);
    for (int m = 0; m < 2; ++m) {
      data.draw(3 * m, 3);
      Gpt(model).forward_backward(engine, data.batch());
    }
    result.gradients = read_all(engine, true);
    result.loss = engine.step().loss;
  });
  return result;
}

/// The masks of a batch as the dropout kernel draws them: its result for ones.
reference_training::DropoutMasks masks_of(const GptConfig& model, const Config& config,
                                          const std::vector<std::int64_t>& samples) {
  return [&model, &config, &samples](std::uint32_t site, std::int64_t elements) {
    const float probability = site == 0             ? model.embedding_dropout
                              : (site - 1) % 3 == 0 ? model.attention_dropout
                                                    : model.residual_dropout;
    std::vector<float> mask(static_cast<std::size_t>(elements), 1.0f);
    const auto device = make_device({});
    const TensorView view{mask.data(), DataType::float32, {elements}};
    kernels::dropout(device->compute_stream(),
                     {.probability = probability, .seed = config.seed, .site = site, .samples = samples},
                     view, view);
    return std::vector<double>(mask.begin(), mask.end());
  };
}

/// The gradients of the same step by the reference; with `config` under its dropout.
Gradients reference_gradients(const GptConfig& model, const Tensors& weights,
                              const Config* config = nullptr) {
  Gradients result{reference_training::zeros(weights)};
  reference_training::LossSum total;
  TokenData data(13, model.vocabulary, true);
  for (int m = 0; m < 2; ++m) {
    data.draw(3 * m, 3);
    const reference_training::DropoutMasks masks =
        config == nullptr ? reference_training::DropoutMasks{} : masks_of(model, *config, data.samples);
    const auto loss =
        reference_training::gpt(model, weights, data.tokens, data.targets, 13, &result.gradients, masks);
    total.sum += loss.sum;
    total.tokens += loss.tokens;
  }
  for (auto& [name, values] : result.gradients) {
    for (auto& value : values) value /= static_cast<double>(total.tokens);
  }
  result.loss = total.sum / static_cast<double>(total.tokens);
  return result;
}

void expect_near(const Tensors& actual, const Tensors& wanted, double tolerance) {
  ASSERT_EQ(actual.size(), wanted.size());
  for (const auto& [name, values] : wanted) {
    EXPECT_LE(relative_distance(actual.at(name), values), tolerance) << name;
  }
}

TEST(ReferenceGpt, BackwardAgreesWithFiniteDifferences) {
  const GptConfig model = tiny_gpt();
  TokenData data(7, model.vocabulary, true);
  data.draw(0, 2);
  Tensors weights;
  std::uint64_t subject = 0;
  const ModelSpec spec = Gpt::spec(model, 7);
  for (const auto& unit : spec.units()) {
    for (const auto& tensor : unit.tensors) {
      const RandomKey key{.seed = 5, .subject = subject++};
      auto& values = weights[tensor.name];
      for (std::int64_t i = 0; i < tensor.shape.elements(); ++i) {
        values.push_back(0.3 * random_normal(key, static_cast<std::uint64_t>(i)) +
                         (tensor.initializer.kind == Initializer::Kind::constant ? tensor.initializer.a : 0));
      }
    }
  }
  Tensors gradients = reference_training::zeros(weights);
  (void)reference_training::gpt(model, weights, data.tokens, data.targets, 7, &gradients);
  const auto loss_at = [&](double& weight, double value) {
    const double kept = std::exchange(weight, value);
    const double loss = reference_training::gpt(model, weights, data.tokens, data.targets, 7, nullptr).sum;
    weight = kept;
    return loss;
  };
  // Central differences: the error is h^2 times a third derivative plus 1e-16 * loss / h, about 1e-9 here.
  constexpr double h = 1e-5;
  for (auto& [name, values] : weights) {
    const RandomKey key{.seed = 6, .subject = values.size()};
    for (std::uint64_t draw = 0; draw < 6; ++draw) {
      const std::size_t i = random_bits(key, draw) % values.size();
      const double slope = (loss_at(values[i], values[i] + h) - loss_at(values[i], values[i] - h)) / (2 * h);
      EXPECT_NEAR(gradients[name][i], slope, 1e-6 * std::max(1.0, std::abs(slope)))
          << name << " element " << i;
    }
  }
}

TEST(Gpt, GradientsAgreeWithTheReference) {
  Tensors weights;
  const auto actual = engine_gradients(tiny_gpt(), plain_config(6), &weights);
  const auto wanted = reference_gradients(tiny_gpt(), weights);
  // fp32 sums of up to 78 rows and 96 columns have errors of a few 2^-24 each, together well below 1e-5 in
  // norm.
  expect_near(actual.gradients, wanted.gradients, 1e-5);
  EXPECT_NEAR(actual.loss, wanted.loss, 1e-6 * wanted.loss);
}

TEST(Gpt, GradientsAgreeWithTheReferenceForAnUnevenInnerWidth) {
  auto model = tiny_gpt();
  model.inner = 37;
  model.heads = 3;
  model.layers = 3;
  Tensors weights;
  const auto actual = engine_gradients(model, plain_config(6), &weights);
  expect_near(actual.gradients, reference_gradients(model, weights).gradients, 1e-5);
}

TEST(Gpt, GradientsUnderDropoutAgreeWithTheReference) {
  auto model = tiny_gpt();
  model.embedding_dropout = 0.1f;
  model.attention_dropout = 0.4f;
  model.residual_dropout = 0.25f;
  Tensors weights;
  const auto config = plain_config(6);
  const auto actual = engine_gradients(model, config, &weights);
  const auto wanted = reference_gradients(model, weights, &config);
  expect_near(actual.gradients, wanted.gradients, 1e-5);
  EXPECT_NEAR(actual.loss, wanted.loss, 1e-6 * wanted.loss);
  EXPECT_GT(std::abs(wanted.loss - reference_gradients(model, weights).loss), 1e-3)
      << "dropout has an effect";
}

TEST(Gpt, GradientsOf16BitsAgreeWithTheReferenceToTheirPrecision) {
  // A 16-bit activation has a relative error of 2^-9 (bf16) or 2^-12 (fp16). A dozen consecutive roundings,
  // in forward and again in backward, added up to at most 0.019 and 0.0018 of a tensor's norm when measured.
  for (const auto& [dtype, tolerance] : {std::pair{DataType::bfloat16, 0.03}, {DataType::float16, 0.004}}) {
    auto config = plain_config(6);
    config.precision.compute = dtype;
    config.loss_scaling = dtype == DataType::float16;
    Tensors weights;
    const auto actual = engine_gradients(tiny_gpt(), config, &weights);
    const auto wanted = reference_gradients(tiny_gpt(), weights);
    for (const auto& [name, values] : wanted.gradients) {
      EXPECT_LE(relative_distance(actual.gradients.at(name), values), tolerance)
          << name << " in " << name_of(dtype);
    }
  }
}

TEST(Gpt, CheckpointingGivesTheSameBits) {
  auto model = tiny_gpt();
  model.layers = 5;
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = 0.2f;
  for (const auto dtype : {DataType::float32, DataType::bfloat16}) {
    auto config = plain_config(6);
    config.precision.compute = dtype;
    config.reduction = ReductionPolicy::micro_batch;  // stages are compared, and their default policies
                                                      // differ
    const auto plain = engine_gradients(model, config);
    config.activation_checkpointing = true;
    for (const int every : {1, 2, 3, 5, 9}) {
      config.checkpoint_every = every;
      for (const int stage : {0, 3}) {
        config.stage = stage;
        const auto recomputed = engine_gradients(model, config);
        EXPECT_EQ(recomputed.loss, plain.loss) << "every " << every << " stage " << stage;
        for (const auto& [name, values] : plain.gradients) {
          EXPECT_TRUE(recomputed.gradients.at(name) == values)
              << name << " with checkpoint_every " << every << " stage " << stage << " " << name_of(dtype);
        }
      }
    }
  }
}

TEST(Gpt, VocabularyChunksChangeNoBit) {
  // The head has three blocks, the last of which is short: computed as a whole, and in chunks of one, two and
  // three blocks.
  auto model = tiny_gpt();
  model.vocabulary = 2 * head_block_columns + 809;
  int point = 0;
  for (const auto dtype : {DataType::float32, DataType::bfloat16, DataType::float16}) {
    auto config = plain_config(6);
    config.precision.compute = dtype;
    config.loss_scaling = dtype == DataType::float16;
    Tensors weights;
    const auto whole = engine_gradients(model, config, &weights);
    for (const std::int64_t chunk : {std::int64_t{1}, head_block_columns, head_block_columns + 1,
                                     2 * head_block_columns + 1, model.vocabulary, model.vocabulary + 1}) {
      if (!test::swept(point++)) continue;
      config.vocabulary_chunk = chunk;
      const auto chunked = engine_gradients(model, config);
      EXPECT_EQ(chunked.loss, whole.loss) << "chunk " << chunk << " " << name_of(dtype);
      for (const auto& [name, values] : whole.gradients) {
        EXPECT_TRUE(chunked.gradients.at(name) == values)
            << name << ", chunk " << chunk << " " << name_of(dtype);
      }
    }
    if (dtype != DataType::float32) continue;
    // The blocks of the head add up to the model's: sums of 9001 terms, with errors of a few 2^-24 each.
    const auto wanted = reference_gradients(model, weights);
    EXPECT_NEAR(whole.loss, wanted.loss, 1e-6 * wanted.loss);
    expect_near(whole.gradients, wanted.gradients, 1e-5);
  }
}

TEST(Gpt, SavingActivationsChangesNoBitInAnyStage) {
  // Checkpoints for each block, for every k blocks with groups that stay gathered and that do not, the
  // chunked head; two ranks.
  auto model = tiny_gpt();
  model.layers = 5;
  model.vocabulary = head_block_columns + 77;
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = 0.2f;
  int point = 0;
  for (const auto dtype : {DataType::float32, DataType::bfloat16}) {
    auto config = plain_config(4, 2);
    config.accumulation_steps = 2;
    config.micro_batch_size = 1;
    config.precision.compute = config.precision.communication = dtype;
    config.reduction = ReductionPolicy::micro_batch;  // stages are compared, and their default policies
                                                      // differ
    const auto train = [&] {
      return train_gpt(2, model, config, 2, 13, true, DeviceKind::cpu, nullptr, true);
    };
    const auto plain = train();
    config.activation_checkpointing = true;
    struct Saving {
      int every, depth;
      std::int64_t chunk;
    };
    for (const Saving saving : {Saving{1, 2, 0}, {2, 2, 1}, {3, 2, 0}, {3, 4, 0}, {5, 1, 1}}) {
      config.checkpoint_every = saving.every;
      config.depth = saving.depth;
      config.vocabulary_chunk = saving.chunk;
      for (config.stage = 0; config.stage <= 3; ++config.stage) {
        if (!test::swept(point++)) continue;
        SCOPED_TRACE("every " + std::to_string(saving.every) + " depth " + std::to_string(saving.depth) +
                     " chunk " + std::to_string(saving.chunk) + " stage " + std::to_string(config.stage) +
                     " " + std::string(name_of(dtype)));
        const auto saved = train();
        EXPECT_EQ(saved.losses, plain.losses);
        EXPECT_EQ(saved.norms, plain.norms);
        EXPECT_EQ(saved.digest, plain.digest);
        EXPECT_TRUE(saved.gradients == plain.gradients);
      }
    }
  }
}

TEST(Gpt, FrozenTensorsLeaveTheOtherGradientsAlone) {
  const auto model = tiny_gpt();
  const auto all = engine_gradients(model, plain_config(6));
  auto config = plain_config(6);
  config.frozen = {"transformer.wpe.weight", "transformer.h.0.*", "*.c_proj.weight", "*.ln_2.bias"};
  on_ranks(1, Gpt::spec(model, 13), config, [&](Engine& engine) {
    std::uint64_t subject = 0;
    for (const auto& [name, values] : read_all(engine)) {
      const RandomKey key{.seed = 3, .subject = subject++};
      std::vector<float> moved(values.begin(), values.end());
      for (std::size_t i = 0; i < moved.size(); ++i) moved[i] += 0.1f * random_normal(key, i);
      engine.write_weight(name, moved);
    }
    TokenData data(13, model.vocabulary, true);
    data.draw(0, 6);
    Gpt(model).forward_backward(engine, data.batch());
    int compared = 0;
    for (const auto& [name, values] : all.gradients) {
      if (engine.frozen(name)) continue;
      const auto read = engine.read_gradient(name);
      EXPECT_LE(relative_distance({read.begin(), read.end()}, values), 1e-5) << name;
      ++compared;
    }
    EXPECT_EQ(compared,
              12);  // 28 tensors without wpe, h.0's twelve, h.1's two projections and one norm's bias
    (void)engine.step();
  });
}

TEST(Gpt, OneTokenAndNoTokenToLearnFrom) {
  const auto model = tiny_gpt();
  auto config = plain_config(2);
  config.micro_batch_size = 1;
  config.accumulation_steps = 2;
  on_ranks(1, Gpt::spec(model, 1), config, [&](Engine& engine) {
    const auto weights = read_all(engine);
    const std::vector<std::int64_t> samples{0};
    const auto run = [&](std::int32_t token, std::int32_t target) {
      const Shape shape{1, 1};
      Gpt(model).forward_backward(
          engine, {{&token, DataType::int32, shape}, {&target, DataType::int32, shape}, samples});
    };
    // A micro-batch in which all targets are ignored adds nothing, and in particular no NaN.
    run(7, kernels::ignored_label);
    run(3, 9);
    auto gradients = reference_training::zeros(weights);
    const std::vector<std::int32_t> token{3}, target{9};
    const auto loss = reference_training::gpt(model, weights, token, target, 1, &gradients);
    for (const auto& [name, values] : read_all(engine, true)) {
      // With one key the scores have no gradient; only rounding is left in query and key.
      double difference = 0, size = 0;
      for (std::size_t i = 0; i < values.size(); ++i) {
        difference = std::max(difference, std::abs(values[i] - gradients[name][i]));
        size = std::max(size, std::abs(gradients[name][i]));
      }
      EXPECT_LE(difference, 1e-5 * size + 1e-9) << name;
    }
    const StepResult result = engine.step();
    EXPECT_EQ(result.tokens, 1);
    EXPECT_NEAR(result.loss, loss.sum, 1e-5);
  });
}

TEST(Gpt, RefusesBatchesThatDoNotFit) {
  const auto model = tiny_gpt();
  on_ranks(1, Gpt::spec(model, 13), plain_config(6), [&](Engine& engine) {
    const Gpt gpt(model);
    TokenData data(17, model.vocabulary, false);
    data.draw(0, 2);
    const auto text = [&](const TokenBatch& batch) -> std::string {
      try {
        gpt.forward_backward(engine, batch);
      } catch (const Error& error) {
        return error.message();
      }
      return "accepted";
    };
    using ::testing::HasSubstr;
    TokenBatch batch = data.batch();
    EXPECT_THAT(text(batch), HasSubstr("sequence length 17"));
    batch.samples = batch.samples.first(1);
    EXPECT_THAT(text(batch), HasSubstr("1 sample indices were given for 2 sequences"));
    batch = data.batch();
    batch.targets.shape = {34};
    EXPECT_THAT(text(batch), HasSubstr("targets must be int32 [2, 17]"));
    batch = data.batch();
    batch.tokens.dtype = DataType::int64;
    EXPECT_THAT(text(batch), HasSubstr("tokens must be int32 [batch, time], not int64"));
    auto deeper = model;
    deeper.layers = 7;
    data.time = 13;
    data.draw(0, 2);
    try {
      Gpt(deeper).forward_backward(engine, data.batch());
      FAIL() << "a deeper model was accepted";
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.message(),
                  HasSubstr("the engine holds 3 units, but this model of GPT2LMHeadModel has 8"));
    }
  });
}

}  // namespace
}  // namespace tranche::models
