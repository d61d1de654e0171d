// Language models through their common interface.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "own_schedule.h"
#include "tests/core/error_text.h"
#include "tiny_llama.h"
#include "training_fixture.h"
#include "tranche/core/error.h"
#include "tranche/models/llama.h"

namespace tranche::models {
namespace {

using test::message_of;
using testing::HasSubstr;

constexpr std::int64_t tokens_each = 11;

/// The digest of the weights after three steps of two micro-batches, which `micro_batch` computes.
kernels::Digest trained(const LanguageModel& model, Config config,
                        const std::function<void(Engine&, const TokenBatch&)>& micro_batch) {
  config.accumulation_steps = 2;
  config.micro_batch_size = 2;
  config.train_batch_size = 4;
  kernels::Digest digest;
  on_ranks(1, model.spec(tokens_each), config, [&](Engine& engine) {
    TokenData data(tokens_each, model.shape().vocabulary, true);
    for (int step = 0; step < 3; ++step) {
      for (int m = 0; m < 2; ++m) {
        data.draw(4 * step + 2 * m, 2);
        micro_batch(engine, data.batch());
      }
      (void)engine.step();
    }
    digest = engine.weights_digest();
  });
  return digest;
}

TEST(LanguageModel, WeightGradientsThatArePutOffHaveTheSameBits) {
  GptConfig config = tiny_gpt();
  for (const float dropout : {0.0f, 0.2f}) {
    config.embedding_dropout = config.attention_dropout = config.residual_dropout = dropout;
    const Gpt model(config);
    for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
      Config training = plain_config(4);
      training.precision.compute = training.precision.communication = dtype;
      const auto combined = trained(model, training, [&](Engine& engine, const TokenBatch& batch) {
        model.forward_backward(engine, batch);
      });
      const auto split = trained(model, training, [&](Engine& engine, const TokenBatch& batch) {
        weights_last(model, engine, batch);
      });
      EXPECT_TRUE(split == combined) << name_of(dtype) << ", dropout " << dropout;
    }
  }
}

TEST(LanguageModel, ABatchThatItCannotUseIsRefused) {
  const Gpt model(tiny_gpt());
  on_ranks(1, model.spec(tokens_each), plain_config(2), [&](Engine& engine) {
    TokenData data(tokens_each, model.shape().vocabulary, false);
    data.draw(0, 2);
    const auto refusal = [&](TokenBatch batch) {
      try {
        (void)model.pass_of(engine, batch, true);
      } catch (const InvalidArgument& error) {
        return std::string(error.message());
      }
      return std::string("not refused");
    };
    TokenBatch batch = data.batch();
    EXPECT_EQ(refusal(batch), "not refused");
    batch.document_begin = batch.tokens;
    EXPECT_THAT(refusal(batch), HasSubstr("document boundaries were given, but GPT2LMHeadModel cannot"));
    batch = data.batch();
    batch.positions = batch.tokens;
    EXPECT_THAT(refusal(batch), HasSubstr("positions were given, but GPT2LMHeadModel cannot"));
  });
}

TEST(LanguageModel, DocumentsAndPositionsHaveTheShapeOfTheTokens) {
  const Llama model(tiny_llama(LlamaKind::qwen3));
  on_ranks(1, model.spec(tokens_each), plain_config(2), [&](Engine& engine) {
    TokenData data(tokens_each, model.shape().vocabulary, false);
    data.draw(0, 2);
    const std::string time = std::to_string(tokens_each);
    for (const bool documents : {false, true}) {
      const auto refusal = [&](DataType dtype, Shape shape) {
        TokenBatch batch = data.batch();
        std::optional<ConstTensorView>& places = documents ? batch.document_begin : batch.positions;
        places = batch.tokens;
        places->dtype = dtype;
        places->shape = shape;
        return message_of<InvalidArgument>([&] { (void)model.pass_of(engine, batch, true); });
      };
      const std::string wanted = std::string(documents ? "document boundaries" : "positions") +
                                 " must be int32 [2, " + time + "] as the tokens are, not ";
      EXPECT_THAT(refusal(DataType::int64, {2, tokens_each}), HasSubstr(wanted + "int64 [2, " + time + "]"));
      EXPECT_THAT(refusal(DataType::int32, {1, tokens_each}), HasSubstr(wanted + "int32 [1, " + time + "]"));
    }
  });
}

TEST(LanguageModel, NamesOfHuggingFacesFiles) {
  const Gpt model(tiny_gpt());
  EXPECT_EQ(model.tensor_of("transformer.h.0.ln_1.weight"), "transformer.h.0.ln_1.weight");
  EXPECT_EQ(model.tensor_of("h.0.ln_1.weight"), "transformer.h.0.ln_1.weight");
  EXPECT_EQ(model.tensor_of("lm_head.weight"), "lm_head.weight");
  EXPECT_EQ(model.tensor_of("h.3.attn.masked_bias"), "");
}

}  // namespace
}  // namespace tranche::models
