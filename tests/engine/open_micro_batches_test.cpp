// Several open micro-batches: interleaved they give the bits of one after the other.

#include <gmock/gmock.h>

#include <deque>
#include <tuple>

#include "on_ranks.h"

namespace tranche::test {
namespace {

using ::testing::HasSubstr;

constexpr int units = 4;

std::int64_t first_sample(const Engine& engine, const Runtime& runtime, std::int64_t step, std::int64_t m) {
  return ((step * engine.config().accumulation_steps + m) * runtime.size() + runtime.rank()) * 3;
}

/// A step of three micro-batches: two forward passes at first, then a backward pass beside a forward pass,
/// and the last two backward passes unit by unit, as no pipeline would have them closer.
void interleaved_step(Engine& engine, Runtime& runtime, std::int64_t step) {
  std::deque<OddMicroBatch> open;  // whose addresses stay
  const auto begin = [&] {
    const std::int64_t number = engine.begin_micro_batch_beside();
    EXPECT_EQ(number, engine.micro_batch());
    open.emplace_back(engine, first_sample(engine, runtime, step, number), 3);
  };
  const auto backward = [&](std::int64_t m, int place) {
    engine.select_micro_batch(m);
    const bool tied = place == 0 || place == units;
    open[static_cast<std::size_t>(m)].backward(tied ? 0 : units - place, tied ? 0.5f : 1.0f);
  };
  const auto end = [&](std::int64_t m) {
    engine.select_micro_batch(m);
    open[static_cast<std::size_t>(m)].end();
  };
  begin();
  for (int u = 0; u < units; ++u) open[0].forward(u);
  begin();
  for (int u = 0; u < units; ++u) open[1].forward(u);
  begin();
  for (int place = 0; place <= units; ++place) {
    if (place < units) {
      engine.select_micro_batch(2);
      open[2].forward(place);
    }
    backward(0, place);
  }
  end(0);
  for (int place = 0; place <= units; ++place) {
    backward(1, place);
    // The tied unit's gradients of the second are complete with its last use alone.
    if (place > 0 && place < units) backward(2, place);
  }
  end(1);
  backward(2, 0);
  backward(2, units);
  end(2);
}

class OpenMicroBatches : public ::testing::TestWithParam<std::tuple<int, ReductionPolicy, int>> {};

TEST_P(OpenMicroBatches, InterleavedHaveTheBitsOfOneAfterTheOther) {
  const auto [stage, policy, variant] = GetParam();
  OddRun run;
  run.ranks = 2 + variant % 2;
  run.stage = stage;
  run.policy = policy;
  run.accumulation = 3;
  run.dtype = variant == 0 ? DataType::float32 : DataType::bfloat16;
  run.depth = units;
  if (variant == 2) {
    run.gather_for = GatherFor::step;
    run.poison = true;
  }
  constexpr int steps = 3;
  const kernels::Digest expected = digest_after(run, [&](Engine& engine, Runtime& runtime) {
    for (int step = 0; step < steps; ++step) {
      whole_step(engine, runtime, step);
      EXPECT_TRUE(engine.step().applied);
    }
  });
  const kernels::Digest actual = digest_after(run, [&](Engine& engine, Runtime& runtime) {
    for (int step = 0; step < steps; ++step) {
      interleaved_step(engine, runtime, step);
      EXPECT_TRUE(engine.step().applied);
    }
  });
  EXPECT_EQ(actual, expected);
}

INSTANTIATE_TEST_SUITE_P(Stages, OpenMicroBatches,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3),
                                            ::testing::Values(ReductionPolicy::boundary,
                                                              ReductionPolicy::micro_batch),
                                            ::testing::Values(0, 1, 2)));

TEST(OpenMicroBatch, RefusesWhatWouldChangeSumsOrMixPasses) {
  OddRun run;
  run.accumulation = 3;
  run.depth = units;
  on_ranks(run, [](Engine& engine, Runtime&) {
    EXPECT_EQ(engine.begin_micro_batch_beside(), 0);
    EXPECT_EQ(engine.begin_micro_batch_beside(), 1);
    const auto refusal = [](auto&& call) { return message_of<LogicError>(call); };
    EXPECT_THAT(refusal([&] { engine.begin_micro_batch(); }),
                HasSubstr("begin_micro_batch() inside a micro-batch"));
    EXPECT_THAT(
        refusal([&] { (void)engine.gradients({1}); }),
        HasSubstr(
            "gradients(prime) of micro-batch 1 before micro-batch 0 has submitted its own: a unit takes "
            "gradients in ascending micro-batches"));
    EXPECT_THAT(refusal([&] { engine.select_micro_batch(2); }),
                HasSubstr("select_micro_batch(2), which is not open"));
    {
      const GatheredUnit held = engine.gather({2});
      engine.select_micro_batch(0);
      for (int unit = 0; unit < units; ++unit) engine.skip_gradients({unit});
      end_with(engine, 1, 3);  // although micro-batch 1 holds a unit
      EXPECT_EQ(engine.micro_batch(), 1) << "the one that is open is the current one";
      EXPECT_THAT(refusal([&] { end_with(engine, 1, 3); }), HasSubstr("while unit tiny is still held"));
    }
    EXPECT_THAT(refusal([&] { engine.step(); }), HasSubstr("step() inside a micro-batch"));
    for (int unit = 0; unit < units; ++unit) engine.skip_gradients({unit});
    end_with(engine, 1, 3);
    EXPECT_EQ(engine.begin_micro_batch(), 2);
    for (int unit = 0; unit < units; ++unit) engine.skip_gradients({unit});
    end_with(engine, 1, 3);
    EXPECT_TRUE(engine.step().applied);
    engine.begin_evaluation();
    EXPECT_THAT(refusal([&] {
                  engine.begin_micro_batch();
                  engine.begin_micro_batch_beside();
                }),
                HasSubstr("begin_micro_batch() inside a micro-batch"));
    end_with(engine, 1, 3);
    (void)engine.end_evaluation();
  });
}

}  // namespace
}  // namespace tranche::test
