// Several active micro-batches: interleaved they have the bits of sequential ones.

#include <gmock/gmock.h>

#include <cstring>
#include <deque>
#include <filesystem>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "on_ranks.h"

namespace tranche::test {
namespace {

using ::testing::HasSubstr;

constexpr int units = 4;

std::int64_t first_sample(const Engine& engine, const Runtime& runtime, std::int64_t step, std::int64_t m) {
  return ((step * engine.config().accumulation_steps + m) * runtime.size() + runtime.rank()) * 3;
}

/// A step of three micro-batches: first two forward passes, then a backward pass interleaved with a forward
/// pass, then the last two backward passes unit by unit, more closely interleaved than in any pipeline.
void interleaved_step(Engine& engine, Runtime& runtime, std::int64_t step) {
  std::deque<OddMicroBatch> open;  // a deque keeps their addresses valid
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
    // The tied unit's gradients of the second one are complete only after its last use.
    if (place > 0 && place < units) backward(2, place);
  }
  end(1);
  backward(2, 0);
  backward(2, units);
  end(2);
}

/// Features that are combined with interleaved micro-batches, each with its settings. False: not supported at
/// this stage or policy.
struct Feature {
  const char* name;
  std::function<bool(OddRun&)> set;
};

const std::vector<Feature>& features() {
  static const std::vector<Feature> all{
      {"fp32", [](OddRun&) { return true; }},
      {"bf16 on three ranks",
       [](OddRun& run) {
         run.ranks = 3;
         run.dtype = DataType::bfloat16;
         return true;
       }},
      {"fp16 with a loss scale, bf16 sums",
       [](OddRun& run) {
         run.dtype = DataType::float16;
         run.accumulation_dtype = DataType::bfloat16;
         return true;
       }},
      {"units kept for the step, poisoned memory",
       [](OddRun& run) {
         run.gather_for = GatherFor::step;
         run.poison = true;
         return true;
       }},
      {"state in host memory",
       [](OddRun& run) {
         run.offload.optimizer = OffloadTier::cpu;
         if (run.stage == 3) run.offload.parameters = OffloadTier::cpu;
         return true;
       }},
      {"state on NVMe",
       [](OddRun& run) {
         run.offload.optimizer = OffloadTier::nvme;
         if (run.stage == 3) run.offload.parameters = OffloadTier::nvme;
         run.offload.tile_elements = 4096;
         run.offload.nvme_path = std::filesystem::temp_directory_path().string();
         return true;
       }},
      {"replicas",
       [](OddRun& run) {
         run.ranks = 4;
         run.mesh = "replicate=2, shard=*";
         return true;
       }},
      {"int8 gradients",
       [](OddRun& run) {
         run.quantized_gradients = true;
         return run.policy == ReductionPolicy::micro_batch;
       }},
      {"any number of ranks",
       [](OddRun& run) {
         run.micro_batches = 6;
         return run.policy == ReductionPolicy::micro_batch;
       }},
      {"Muon",
       [](OddRun& run) {
         run.optimizer = "Muon";
         return true;
       }},
      {"LAMB, stochastic rounding",
       [](OddRun& run) {
         run.optimizer = "Lamb";
         run.dtype = DataType::bfloat16;
         run.master = MasterFormat::none;
         run.stochastic_rounding = true;
         return true;
       }},
  };
  return all;
}

class OpenMicroBatches : public ::testing::TestWithParam<std::tuple<int, ReductionPolicy>> {};

TEST_P(OpenMicroBatches, InterleavedHaveTheBitsOfOneAfterTheOther) {
  for (const Feature& feature : features()) {
    OddRun run;
    std::tie(run.stage, run.policy) = GetParam();
    run.ranks = 2;
    run.accumulation = 3;
    run.depth = units;
    if (!feature.set(run)) continue;
    constexpr int steps = 3;
    const auto trained = [&](const std::function<void(Engine&, Runtime&, std::int64_t)>& one_step) {
      return digest_after(run, [&](Engine& engine, Runtime& runtime) {
        ASSERT_EQ(engine.config().accumulation_steps, 3);
        for (int step = 0; step < steps; ++step) {
          one_step(engine, runtime, step);
          EXPECT_TRUE(engine.step().applied) << feature.name;
        }
      });
    };
    EXPECT_EQ(trained(interleaved_step), trained([](Engine& engine, Runtime& runtime, std::int64_t step) {
                whole_step(engine, runtime, step);
              }))
        << feature.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, OpenMicroBatches,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3),
                                            ::testing::Values(ReductionPolicy::boundary,
                                                              ReductionPolicy::micro_batch)));

// Activations that leave the device, and sizes that grow while other micro-batches are active, come back
// unchanged.
TEST(OpenMicroBatch, KeepsItsOwnActivationsWhereverTheyLie) {
  for (const bool offload : {false, true}) {
    OddRun run;
    run.accumulation = 2;
    run.depth = units;
    const auto adjust = [&](Config& config, RuntimeOptions&) {
      config.activation_checkpointing = config.offload.activations = offload;
    };
    const auto body = [](Engine& engine, Runtime& runtime) {
      for (std::int64_t step = 0; step < 5; ++step) {
        std::vector<HostCopy> sent;
        const std::int64_t samples[2] = {step * 2, step * 2 + 1};
        std::deque<OddMicroBatch> open;
        const auto bytes = [&](std::int64_t m) { return (step < 3 ? 1 : m + step) * 4096; };
        for (std::int64_t m = 0; m < 2; ++m) {
          const std::int64_t& sample = samples[m];
          EXPECT_EQ(engine.begin_micro_batch_beside(Shape{bytes(m)}, {&sample, 1}), m);
          open.emplace_back(engine, first_sample(engine, runtime, step, m), 3);
          StepBuffer activations = engine.acquire(bytes(m), Category::activations, "activations");
          std::memset(activations.data(), static_cast<int>(sample), static_cast<std::size_t>(bytes(m)));
          sent.push_back(engine.send_to_host(std::move(activations), "activations"));
          sent.back().leave_device();
          EXPECT_EQ(engine.micro_batch_samples().front(), sample);
          for (int unit = 0; unit < units; ++unit) open.back().forward(unit);
        }
        for (std::int64_t m = 0; m < 2; ++m) {
          engine.select_micro_batch(m);
          {
            const StepBuffer back = engine.fetch_from_host(std::move(sent[static_cast<std::size_t>(m)]));
            engine.compute_stream().synchronize();
            const std::string held(static_cast<const char*>(back.data()), static_cast<std::size_t>(bytes(m)));
            EXPECT_EQ(held, std::string(held.size(), static_cast<char>(step * 2 + m)));
          }
          for (int place = 0; place <= units; ++place) {
            const bool tied = place == 0 || place == units;
            open[static_cast<std::size_t>(m)].backward(tied ? 0 : units - place, tied ? 0.5f : 1.0f);
          }
          open[static_cast<std::size_t>(m)].end();
        }
        open.clear();
        EXPECT_TRUE(engine.step().applied);
      }
    };
    on_ranks(run, body, adjust);
  }
}

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
      {
        // A handle belongs to its micro-batch, whichever is current when it is used.
        UnitGradients gradients = engine.gradients({1});
        engine.select_micro_batch(1);
        std::move(gradients).reduce();
        EXPECT_NO_THROW(engine.skip_gradients({1})) << "those of the first have been submitted";
        engine.select_micro_batch(0);
      }
      for (const int unit : {0, 2, 3}) engine.skip_gradients({unit});
      end_with(engine, 1, 3);  // although micro-batch 1 holds a unit
      EXPECT_EQ(engine.micro_batch(), 1) << "the one that is open is the current one";
      EXPECT_THAT(refusal([&] { end_with(engine, 1, 3); }), HasSubstr("while unit tiny is still held"));
    }
    EXPECT_THAT(refusal([&] { engine.step(); }), HasSubstr("step() inside a micro-batch"));
    for (const int unit : {0, 2, 3}) engine.skip_gradients({unit});
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

// Gradients of two micro-batches may be pending, but are submitted in ascending order.
TEST(OpenMicroBatch, SubmitsGradientsThatWerePutOffInAscendingOrder) {
  OddRun run;
  run.accumulation = 2;
  run.depth = units;
  run.stage = 3;
  on_ranks(run, [](Engine& engine, Runtime&) {
    const auto refusal = [](auto&& call) { return message_of<LogicError>(call); };
    EXPECT_THAT(refusal([&] { (void)engine.hold({2}); }), HasSubstr("gather(tiny) outside a micro-batch"));
    engine.begin_micro_batch_beside();
    engine.begin_micro_batch_beside();
    GatheredUnit held = engine.hold({2});
    UnitGradients second = engine.gradients_ahead({1});
    engine.select_micro_batch(0);
    UnitGradients first = engine.gradients({1});
    EXPECT_THAT(refusal([&] { std::move(second).reduce(); }),
                HasSubstr("reduce(prime) of micro-batch 1 before micro-batch 0 has submitted its own: a unit "
                          "takes gradients in ascending micro-batches"));
    std::move(first).reduce();
    std::move(second).reduce();
    for (const int unit : {0, 2, 3}) engine.skip_gradients({unit});
    end_with(engine, 1, 3);  // although the unit is held, but for no micro-batch
    for (const int unit : {0, 2, 3}) engine.skip_gradients({unit});
    held.release();
    end_with(engine, 1, 3);
    EXPECT_TRUE(engine.step().applied);
  });
}

}  // namespace
}  // namespace tranche::test
