#pragma once
/// Training on the stages of a pipeline, for tests that compare results: narrow models, and the bits of a few
/// steps and an evaluation.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/models/training_fixture.h"
#include "tranche/core/error.h"
#include "tranche/models/llama.h"

namespace tranche::models::pipelines {

constexpr std::int64_t time_steps = 11;
constexpr int steps = 3;
constexpr std::array schedules{"1f1b", "afab", "interleaved", "breadth-first", "zb-h1", "zb-v"};

/// The bits of a training: those of all state at its end, of each step, and of an evaluation.
struct Bits {
  kernels::Digest state, weights;
  std::vector<double> losses, norms, evaluated;
  friend bool operator==(const Bits&, const Bits&) = default;
};

inline std::shared_ptr<const LanguageModel> narrow_model(bool llama, std::int64_t layers) {
  if (llama) {
    LlamaConfig config = LlamaConfig::preset("qwen3-nano");
    config.tied = false;
    config.layers = layers;
    config.vocabulary = 61;
    config.positions = 16;
    return std::make_shared<Llama>(config);
  }
  GptConfig config = tiny_gpt();
  config.layers = layers;
  config.embedding_dropout = config.attention_dropout = config.residual_dropout = 0.1f;
  return std::make_shared<Gpt>(config);
}

inline Config pipeline_config(DataType dtype, int stage, ReductionPolicy policy, int micro_batches = 4) {
  Config config = plain_config(1);
  config.train_batch_size = 0;
  config.micro_batch_size = 1;
  config.accumulation_steps = micro_batches;
  config.stage = stage;
  config.reduction = policy;
  config.precision.compute = config.precision.communication = dtype;
  config.gradient_clipping = 0.5;
  config.optimizer.learning_rate = 2e-3;
  config.optimizer.parameters["weight_decay"] = 0.1;
  config.tie_sum = TieSum::by_use;
  return config;
}

/// Data of a step; each micro-batch has its own memory, because several are active at once.
struct StepData {
  std::vector<TokenData> places;
  /// `ignored`: some tokens are not learned.
  StepData(Engine& engine, std::int64_t vocabulary, bool ignored = true)
      : places(static_cast<std::size_t>(engine.config().accumulation_steps),
               TokenData(time_steps, vocabulary, ignored)) {}
  TokenBatch draw(Engine& engine, std::int64_t m) {
    const Mesh& mesh = engine.runtime().mesh();
    TokenData& data = places[static_cast<std::size_t>(m)];
    data.draw(engine.samples() + m * mesh.data_ranks() + mesh.data_rank(engine.runtime().rank()), 1);
    return data.batch();
  }
};

inline StepResult train(Engine& engine, const LanguageModel& model, bool ignored = true) {
  StepData data(engine, model.shape().vocabulary, ignored);
  train_step(model, engine, [&](std::int64_t m) { return data.draw(engine, m); });
  return engine.step();
}

inline Bits bits_of(Engine& engine, const LanguageModel& model, bool ignored = true) {
  Bits mine;
  for (int step = 0; step < steps; ++step) {
    const StepResult result = train(engine, model, ignored);
    mine.losses.push_back(result.loss);
    mine.norms.push_back(result.gradient_norm);
  }
  const Mesh& mesh = engine.runtime().mesh();
  engine.begin_evaluation();
  TokenData data(time_steps, model.shape().vocabulary, true);
  for (std::int64_t first = 0; first < 6; first += mesh.data_ranks()) {
    data.draw(1000 + first + mesh.data_rank(engine.runtime().rank()), 1);
    model.evaluate(engine, data.batch());
  }
  mine.evaluated.push_back(engine.end_evaluation().loss);
  mine.state = engine.state_digest();
  mine.weights = engine.weights_digest();
  return mine;
}

/// The results of every rank of the mesh, which must agree.
inline Bits trained(const LanguageModel& model, Config config, const std::string& mesh, int ranks,
                    const std::string& schedule = "1f1b", bool ignored = true) {
  config.mesh = mesh;
  config.pipeline_schedule = schedule;
  config.communication_timeout = patience_of(ranks);
  std::vector<Bits> all;
  std::mutex mutex;
  on_ranks(ranks, model.spec(time_steps), config, [&](Engine& engine) {
    Bits mine = bits_of(engine, model, ignored);
    const std::lock_guard lock(mutex);
    all.push_back(std::move(mine));
  });
  for (const Bits& other : all)
    EXPECT_TRUE(other == all.front()) << "all ranks know loss, norm and evaluation";
  return all.front();
}

/// The error of an engine on so many ranks, in its constructor or in `body`.
inline std::string refusal(
    const Config& config, int ranks, const LanguageModel& model,
    const std::function<void(Engine&)>& body = [](Engine&) {}) {
  std::string text = "nothing was thrown";
  try {
    on_ranks(ranks, model.spec(time_steps), config, [&](Engine& engine) { body(engine); });
  } catch (const Error& error) {
    text = error.message();
  }
  return text;
}

}  // namespace tranche::models::pipelines
