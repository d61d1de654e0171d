// A GPT with dropout and clipping on any number of ranks: the losses, weights and moments of a single rank.
#include <gtest/gtest.h>

#include <mutex>

#include "training_fixture.h"

namespace tranche::models {
namespace {

constexpr std::int64_t time_steps = 11;
constexpr int steps = 50;

/// The bits of a training: those of all state at its end, of each step, and of evaluations between steps.
struct Bits {
  kernels::Digest state;
  std::vector<double> losses, norms, clipped, evaluated;
  friend bool operator==(const Bits&, const Bits&) = default;
};

/// Trains with 12 micro-batches a step.
Bits trained(int ranks, int stage, DataType dtype) {
  GptConfig model = tiny_gpt();
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = 0.1f;
  Config config = plain_config(12);
  config.micro_batch_size = 1;
  config.accumulation_steps = 0;
  config.world_size_invariant = true;
  config.stage = stage;
  config.precision.compute = config.precision.communication = dtype;
  config.gradient_clipping = 0.5;
  config.optimizer.learning_rate = 2e-3;
  config.optimizer.parameters["weight_decay"] = 0.1;
  Bits bits;
  std::mutex mutex;
  const Gpt gpt(model);
  on_ranks(ranks, gpt.spec(time_steps), config, [&](Engine& engine) {
    const int rank = engine.runtime().rank();
    TokenData data(time_steps, model.vocabulary, true);
    Bits mine;
    for (int step = 0; step < steps; ++step) {
      for (std::int64_t m = 0; m < engine.config().accumulation_steps; ++m) {
        data.draw(engine.samples() + m * ranks + rank, 1);
        gpt.forward_backward(engine, data.batch());
      }
      const StepResult result = engine.step();
      mine.losses.push_back(result.loss);
      mine.norms.push_back(result.gradient_norm);
      mine.clipped.push_back(result.clip_coefficient);
      if (step % 10 != 9) continue;
      engine.begin_evaluation();
      for (std::int64_t first = 0; first < 13; first += ranks) {
        data.draw(1000 + first + rank, 1);
        if (first + rank >= 13) data.targets.assign(data.targets.size(), -100);
        gpt.evaluate(engine, data.batch());
      }
      mine.evaluated.push_back(engine.end_evaluation().loss);
    }
    mine.state = engine.state_digest();
    const std::lock_guard lock(mutex);
    if (rank == 0) bits = std::move(mine);
  });
  return bits;
}

void expect_bits_of_one_rank(DataType dtype, bool whole) {
  const Bits one = trained(1, 0, dtype);
  EXPECT_LT(one.losses.back(), one.losses.front() - 0.2) << "it learns";
  EXPECT_LT(*std::min_element(one.clipped.begin(), one.clipped.end()), 1) << "clipping has an effect";
  for (const int ranks : {1, 2, 3, 4, 5, 6, 8}) {
    for (int stage = 0; stage <= 3; ++stage) {
      if (!whole && (ranks < 3 || ranks == 6 || stage != ranks % 4)) continue;
      EXPECT_TRUE(trained(ranks, stage, dtype) == one)
          << ranks << " ranks, stage " << stage << ", " << name_of(dtype);
    }
  }
}

TEST(AnyNumberOfRanks, TrainsToTheBitsOfOne) {
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) expect_bits_of_one_rank(dtype, false);
}

TEST(AnyNumberOfRanksSlow, TrainsToTheBitsOfOneAtEveryStage) {
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) expect_bits_of_one_rank(dtype, true);
}

}  // namespace
}  // namespace tranche::models
