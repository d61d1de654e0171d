#pragma once
/// A tiny model on thread ranks, and windows of text for it.

#include <functional>
#include <string>
#include <utility>

#include "tests/comm/common_start.h"
#include "tests/tools/temporary.h"
#include "tranche/comm/backends.h"
#include "tranche/engine/engine.h"
#include "tranche/models/gpt.h"
#include "tranche/training/batch_feeder.h"
#include "tranche/training/sampler.h"

namespace tranche::training::test {

inline constexpr std::int64_t sequence = 16, vocabulary = 256;

/// The training text and held-out text of a run.
struct Texts {
  explicit Texts(const tools::test::TemporaryFolder& folder, std::size_t bytes = 4000)
      : file(folder.write("text.txt", tools::test::some_text(bytes))),
        training({&file, 0, file.size() - 200}, sequence, "training"),
        held_out({&file, file.size() - 200, 200}, sequence, "held-out"),
        mixture({{"text", training.count(), 1}}, 1234) {}
  training::TokenFile file;
  training::Windows training, held_out;
  training::Mixture mixture;
};

struct Trained {
  Engine& engine;
  const models::LanguageModel& model;
  BatchFeeder& feeder;
  int rank = 0;

  StepResult step(const Texts& texts) const {
    models::train_step(model, engine, [&](std::int64_t m) {
      return feeder.training_batch(texts.training, texts.mixture, m);
    });
    return engine.step();
  }
};

/// Runs `body` on each of `ranks` thread ranks, when all of them have their engines; `adjust` may change the
/// configuration.
inline void on_ranks(int ranks, const std::function<void(const Trained&)>& body,
                     const std::function<void(Config&)>& adjust = {}) {
  const models::Gpt model(models::GptConfig::preset("gpt-nano"));
  tranche::test::CommonStart start(ranks);
  run_thread_ranks(ranks, [&](int rank, const CommunicatorFactory& factory) {
    tranche::test::CommonStart::Rank started(start);
    Config config;
    config.micro_batch_size = 2;
    config.accumulation_steps = 2;
    config.threads = 1;
    config.communication_timeout = 60;
    config.workspace_bytes = kernels::minimum_workspace_bytes;
    if (adjust) adjust(config);
    validate_config(config, ranks);
    RuntimeOptions options = RuntimeOptions::from(config);
    options.log_level = LogLevel::off;
    Runtime runtime(options, factory);
    Engine engine(runtime, models::Gpt::spec(model.config(), sequence), config);
    BatchFeeder feeder(
        engine, vocabulary,
        {config.micro_batch_size, config.accumulation_steps, engine.runtime().mesh().data_ranks()}, sequence);
    started.await_others();
    body({engine, model, feeder, rank});
  });
}

}  // namespace tranche::training::test
