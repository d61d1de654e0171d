// Gradients that are written instead of cleared and added to, with poisoned memory: the values that a kernel
// finds, and the values that arrive in the main gradient.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "on_ranks.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::test {
namespace {

/// Large tensors, which are not cleared beforehand, between small ones, which are cleared.
enum Tensor : int { written, small, added, nobody, last_small };
constexpr std::int64_t large = 5001;

ModelSpec model() {
  ModelSpec spec;
  const auto zeros = Initializer::zeros();
  spec.add_unit({.name = "unit",
                 .tensors = {{"written", {large}, zeros},
                             {"small", {10}, zeros},
                             {"added", {71, 71}, zeros},
                             {"nobody", {large}, zeros},
                             {"last", {3}, zeros}},
                 .uses_per_micro_batch = 2});
  spec.tokens_per_sample = 1;
  return spec;
}

void put(Engine& engine, const GradientTarget& target, float value) {
  if (target.accumulate) {
    StepBuffer ones = engine.acquire(target.view.bytes(), Category::activations, "ones");
    const TensorView addend{ones.data(), DataType::float32, target.view.shape};
    kernels::fill_constant(engine.compute_stream(), addend, value);
    kernels::accumulate(engine.compute_stream(), addend, target.view);
    ones.release(engine.compute_stream().record());
  } else {
    kernels::fill_constant(engine.compute_stream(), target.view, value);
  }
}

struct Case {
  ReductionPolicy policy;
  DataType dtype;
  int ranks;
  int stage;
};

class GradientTargets : public ::testing::TestWithParam<Case> {};

TEST_P(GradientTargets, AreWrittenOnceAndAddedToAfterwards) {
  const Case& c = GetParam();
  run_thread_ranks(c.ranks, [&](int, const CommunicatorFactory& factory) {
    Config config;
    config.micro_batch_size = 1;
    config.accumulation_steps = 2;
    config.train_batch_size = 2 * c.ranks;
    config.stage = c.stage;
    config.reduction = c.policy;
    config.precision.compute = config.precision.communication = c.dtype;
    config.threads = 1;
    config.debug.poison_memory = true;
    RuntimeOptions options = RuntimeOptions::from(config);
    options.log_level = LogLevel::off;
    Runtime runtime(options, factory);
    Engine engine(runtime, model(), config);
    for (int step = 0; step < 3; ++step) {
      for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
        // With one reduction per step kernels add to the sum of earlier micro-batches.
        const bool holds_earlier = c.policy == ReductionPolicy::boundary && micro_batch > 0;
        engine.begin_micro_batch();
        UnitGradients gradients = engine.gradients({0});
        GradientTarget target = gradients.target(written);
        EXPECT_EQ(target.accumulate, holds_earlier);
        EXPECT_EQ(target.view.elements(), large);
        put(engine, target, 2);
        EXPECT_TRUE(gradients.target(small).accumulate);
        put(engine, gradients.target(small), 1);
        std::move(gradients).reduce();

        UnitGradients again = engine.gradients({0});
        target = again.target(written);
        EXPECT_TRUE(target.accumulate) << "a second use adds";
        put(engine, target, 1);
        put(engine, {again.tensor(added), true}, 1);  // requested as memory to add to, so it is cleared now
        target = again.target(added);
        EXPECT_TRUE(target.accumulate);
        EXPECT_EQ(target.view.shape, (Shape{71, 71}));
        put(engine, target, 4);
        std::move(again).reduce();

        end_with(engine, 0, 1);
      }
      const auto gradient = [&](const char* name) {
        // Every rank and micro-batch contributed the same; the mean over tokens divides by a power of two.
        std::vector<float> values = engine.read_gradient(name);
        for (const float value : values) EXPECT_EQ(value, values[0]) << name;
        return values[0];
      };
      const float one = gradient("small");
      EXPECT_GT(one, 0);
      EXPECT_EQ(gradient("written"), 3 * one);
      EXPECT_EQ(gradient("added"), 5 * one);
      EXPECT_EQ(gradient("nobody"), 0);
      EXPECT_EQ(gradient("last"), 0);
      EXPECT_TRUE(engine.step().applied);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Policies, GradientTargets,
                         ::testing::Values(Case{ReductionPolicy::micro_batch, DataType::float32, 1, 0},
                                           Case{ReductionPolicy::micro_batch, DataType::bfloat16, 1, 2},
                                           Case{ReductionPolicy::boundary, DataType::float32, 1, 0},
                                           Case{ReductionPolicy::boundary, DataType::bfloat16, 1, 1},
                                           Case{ReductionPolicy::micro_batch, DataType::bfloat16, 2, 3},
                                           Case{ReductionPolicy::boundary, DataType::bfloat16, 2, 1}));

}  // namespace
}  // namespace tranche::test
