// How long stage 3 keeps parameters gathered: for a use, for a step, or always (small tensors). The choice
// changes memory and traffic, but no bit.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <filesystem>

#include "on_ranks.h"
#include "partition/flat_layout.h"
#include "same_bits.h"
#include "saving_fixture.h"
#include "tests/core/rounds.h"
#include "tests/core/sweep.h"
#include "tranche/core/random.h"

namespace tranche::test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;

/// The largest tensors of the odd model's buffers: tiny 3, mixed's frozen one 131, tied 192, mixed 300, prime
/// 1009.
constexpr std::array<std::int64_t, 6> thresholds{0, 3, 131, 192, 300, 1009};

std::string nvme_folder() {
  return std::filesystem::temp_directory_path().string();
}

/// Expects that the formulas of bytes and elements hold on every rank, and that the plan of rank 0 equals the
/// measurement.
void expect_planned(const OddResult& result, OddRun run) {
  EXPECT_EQ(result.wire_elements, result.formula_elements) << run.to_string();
  EXPECT_EQ(result.wire_bytes, result.formula_bytes) << run.to_string();
  for (std::size_t r = 0; r < result.accounts.size() && !run.offload.any(); ++r) {
    EXPECT_EQ(result.accounts[r].persistent[Category::parameters], result.state_bytes[r].parameters)
        << run.to_string();
    EXPECT_EQ(result.accounts[r].persistent[Category::gradients], result.state_bytes[r].gradients)
        << run.to_string();
  }
  run.device = DeviceKind::meta;
  run.poison = false;
  const OddResult plan = train_odd(run);
  EXPECT_EQ(plan.accounts[0].peak, result.accounts[0].peak) << run.to_string();
  EXPECT_EQ(plan.accounts[0].category_peak.bytes, result.accounts[0].category_peak.bytes) << run.to_string();
  EXPECT_EQ(plan.host_accounts[0].peak, result.host_accounts[0].peak) << run.to_string();
  EXPECT_EQ(plan.nvme_accounts[0].peak, result.nvme_accounts[0].peak) << run.to_string();
  EXPECT_EQ(plan.wire_elements[0], result.wire_elements[0]) << run.to_string();
  EXPECT_EQ(plan.wire_bytes[0], result.wire_bytes[0]) << run.to_string();
}

TEST(GatherFor, ChangesNoBitAndIsPlannedToTheByte) {
  AxesMet axes;
  const RandomKey key{27, RandomPurpose::test, 3};
  std::uint64_t draw = 0;
  const auto pick = [&](std::size_t n) { return static_cast<int>(random_bits(key, draw++) % n); };
  const std::array tiers{OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme};
  for (int i = 0; i < 60; ++i) {
    OddRun run;
    run.ranks = 1 + pick(5);
    run.dtype = pick(2) == 0 ? DataType::float32 : DataType::bfloat16;
    run.accumulation = 1 + pick(3);
    run.policy = pick(2) == 0 ? ReductionPolicy::boundary : ReductionPolicy::micro_batch;
    run.frozen = pick(3) != 0;
    run.steps = 3;
    OddRun plain = run;
    plain.overlap = false;
    run.stage = pick(4) == 0 ? pick(3) : 3;
    run.gather_for = pick(2) == 0 ? GatherFor::use : GatherFor::step;
    run.persistent = thresholds[static_cast<std::size_t>(pick(thresholds.size()))];
    if (pick(3) == 0) run.persistent_in_all = 400;
    run.depth = 1 + pick(4);
    run.overlap = pick(4) != 0;
    run.prefetch = pick(3) == 0 ? 300 : 50'000'000;
    run.poison = pick(2) == 0;
    run.faults = {pick(2) * 0.0003, static_cast<std::uint64_t>(i)};
    if (pick(2) == 0) run.offload.optimizer = tiers[static_cast<std::size_t>(pick(3))];
    if (pick(2) == 0 && run.stage == 3) run.offload.parameters = tiers[static_cast<std::size_t>(pick(3))];
    run.offload.ratio = pick(3) == 0 ? 0.5 : 1;
    run.offload.tile_elements = 4096;
    run.offload.nvme_path = nvme_folder();
    axes.meet("ranks", run.ranks);
    axes.meet("stage", run.stage);
    axes.meet("gather_for", run.gather_for == GatherFor::step);
    axes.meet("persistent", run.persistent);
    axes.meet("accumulation", run.accumulation);
    axes.meet("depth", run.depth);
    axes.meet("frozen", run.frozen);
    axes.meet("overlap", run.overlap);
    axes.meet("optimizer", name_of(run.offload.optimizer));
    axes.meet("parameters", name_of(run.offload.parameters));
    if (!swept(i, 4)) continue;
    const OddResult result = train_odd(run);
    expect_same(train_odd(plain), result, run);
    run.faults = {};
    expect_planned(result, run);
    if (::testing::Test::HasFailure()) return;
  }
  axes.expect("ranks", {1, 2, 3, 4, 5});
  axes.expect("stage", {0, 1, 2, 3});
  axes.expect("persistent", {thresholds[0], thresholds[1], thresholds[2], thresholds[3], thresholds[5]});
  axes.expect<std::int64_t>("accumulation", {1, 2, 3});
  axes.expect("depth", {1, 2, 3, 4});
  for (const char* axis : {"gather_for", "frozen", "overlap"}) axes.expect(axis, {false, true});
  for (const char* axis : {"optimizer", "parameters"}) {
    axes.expect<std::string>(axis, {"none", "cpu", "nvme"});
  }
}

TEST(GatherFor, ChangesNoBitOnAMeshWithReplicas) {
  OddRun run;
  run.ranks = 4;
  run.dtype = DataType::bfloat16;
  run.accumulation = 2;
  run.policy = ReductionPolicy::micro_batch;
  run.reduction_group = 2;
  const OddResult expected = train_odd(run);
  run.mesh = "replicate=*, shard=2";
  run.stage = 3;
  for (const Replicate replicate : {Replicate::all, Replicate::parameters}) {
    for (const GatherFor gather_for : {GatherFor::use, GatherFor::step}) {
      for (const std::int64_t persistent : {0, 192}) {
        run.replicate = replicate;
        run.gather_for = gather_for;
        run.persistent = persistent;
        const OddResult result = train_odd(run);
        expect_same(expected, result, run);
        expect_planned(result, run);
      }
    }
  }
}

/// Padded elements of the odd model's buffers, by their use in a step of stage 3.
struct Elements {
  std::int64_t trainable = 0;  ///< reduced
  std::int64_t published = 0;  ///< gathered after the update
  std::int64_t gathered = 0;   ///< gathered for use
  std::int64_t twice = 0;      ///< part of it that belongs to the tied unit, which backward uses twice
};

Elements elements_of(int ranks, std::int64_t persistent) {
  Elements elements;
  const ModelSpec model = odd_model();
  for (const UnitSpec& unit : model.units()) {
    std::vector<std::int64_t> sizes[2];
    for (const TensorSpec& tensor : unit.tensors) {
      sizes[tensor.name == odd_frozen_tensor ? 1 : 0].push_back(tensor.shape.elements());
    }
    for (int frozen = 0; frozen < 2; ++frozen) {
      const std::vector<std::int64_t>& of = sizes[frozen];
      if (of.empty()) continue;
      const std::int64_t padded = detail::FlatLayout(of, ranks).padded_elements();
      const bool whole = *std::max_element(of.begin(), of.end()) <= persistent;
      if (frozen == 0) elements.trainable += padded;
      if (whole && frozen == 0) elements.published += padded;
      if (!whole) elements.gathered += padded;
      if (!whole && unit.name == "tied") elements.twice += padded;
    }
  }
  return elements;
}

TEST(GatherFor, GathersAUnitOnceAStepForTheStepAndNeverWhatStaysWhole) {
  int point = 0;
  for (int ranks = 1; ranks <= 5; ++ranks) {
    for (const std::int64_t accumulation : {1, 3}) {
      for (const ReductionPolicy policy : {ReductionPolicy::boundary, ReductionPolicy::micro_batch}) {
        for (const std::int64_t persistent : thresholds) {
          for (const GatherFor gather_for : {GatherFor::use, GatherFor::step}) {
            if (!swept(point++, 5)) continue;
            OddRun run;
            run.ranks = ranks;
            run.stage = 3;
            run.accumulation = accumulation;
            run.policy = policy;
            run.gather_for = gather_for;
            run.persistent = persistent;
            const Elements of = elements_of(ranks, persistent);
            const std::int64_t gathers =
                gather_for == GatherFor::step ? of.gathered : accumulation * (2 * of.gathered + of.twice);
            const std::int64_t reductions = policy == ReductionPolicy::boundary ? 1 : accumulation;
            const std::int64_t expected =
                (reductions * of.trainable + of.published + gathers) / ranks * (ranks - 1);
            const OddResult result = train_odd(run);
            EXPECT_THAT(result.wire_elements, Each(expected)) << run.to_string();
            EXPECT_THAT(result.formula_elements, Each(expected)) << run.to_string();
            const std::int64_t width = size_of(run.dtype);
            const std::int64_t gathered = result.accounts[0].category_peak[Category::gathered];
            if (ranks == 1) {
              EXPECT_EQ(gathered, 0);
            } else if (gather_for == GatherFor::step) {
              EXPECT_EQ(gathered, of.gathered * width) << run.to_string();
            } else {
              EXPECT_LE(gathered, of.gathered * width) << run.to_string();
            }
          }
        }
      }
    }
  }
}

TEST(GatherFor, AnotherOrderOfUnitsGathersNothingAnew) {
  OddRun run;
  run.ranks = 3;
  run.stage = 3;
  run.accumulation = 2;
  run.gather_for = GatherFor::step;
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    for (int step = 0; step < 4; ++step) {
      odd_micro_batch(engine, runtime.rank(), 1, {}, step == 1);
      odd_micro_batch(engine, 3 + runtime.rank(), 1, {}, step == 2);
      EXPECT_TRUE(engine.step().applied);
      const Elements of = elements_of(3, 0);
      EXPECT_EQ(engine.formula_traffic_elements(), (2 * of.trainable + of.gathered) / 3 * 2);
    }
  });
}

TEST(GatherFor, HoldsMoreThanTheDepthInTrainingAndForUseElsewhere) {
  OddRun run;
  run.ranks = 2;
  run.stage = 3;
  run.depth = 1;
  run.gather_for = GatherFor::step;
  const kernels::Digest expected = digest_after(run, [](Engine& engine, Runtime& runtime) {
    for (int step = 0; step < 4; ++step) {
      whole_step(engine, runtime, step);
      engine.step();
    }
  });
  const kernels::Digest digest = digest_after(run, [](Engine& engine, Runtime& runtime) {
    const auto refused_beyond_the_depth = [&] {
      const GatheredUnit first = engine.gather({0});
      EXPECT_THAT(message_of<LogicError>([&] { (void)engine.gather({1}); }), HasSubstr("tranche.depth is 1"));
    };
    for (int step = 0; step < 4; ++step) {
      engine.begin_evaluation();
      engine.begin_micro_batch();
      refused_beyond_the_depth();
      for (int unit = 3; unit >= 0; --unit) {
        const GatheredUnit held = engine.gather({unit});
        const std::string& name = engine.model().units()[static_cast<std::size_t>(unit)].tensors[0].name;
        const float seen = held.tensor(0).as<float>()[0];
        EXPECT_EQ(seen, engine.read_weight(name)[0]) << "the newest weights";
      }
      end_with(engine, 0, 1);
      engine.end_evaluation();
      {
        const InferenceScope scope(engine);
        refused_beyond_the_depth();
      }
      whole_step(engine, runtime, step);
      EXPECT_TRUE(engine.step().applied);
    }
  });
  EXPECT_EQ(digest, expected);
  on_ranks(run, [](Engine& engine, Runtime&) {
    engine.begin_micro_batch();
    {
      const GatheredUnit first = engine.gather({0}), second = engine.gather({1}), third = engine.gather({3});
    }
    for (int unit = 0; unit < 4; ++unit) engine.skip_gradients({unit});
    end_with(engine, 0, 1);
    {
      StepBuffer held = engine.acquire(256, Category::activations, "held");
      EXPECT_THAT(message_of<LogicError>([&] { engine.step(); }), HasSubstr("held"));
    }
    EXPECT_NO_THROW(engine.step());
  });
}

class GatherForSaving : public Saving {};

TEST_F(GatherForSaving, IsResumedUnderAnotherSetting) {
  struct Setting {
    int stage;
    GatherFor gather_for;
    std::int64_t persistent;
    OffloadTier parameters;
  };
  const Setting settings[] = {
      {3, GatherFor::use, 0, OffloadTier::none},    {3, GatherFor::step, 0, OffloadTier::none},
      {3, GatherFor::use, 192, OffloadTier::none},  {3, GatherFor::step, 131, OffloadTier::cpu},
      {3, GatherFor::use, 1009, OffloadTier::nvme}, {2, GatherFor::use, 0, OffloadTier::none}};
  const auto run_of = [](const Setting& setting) {
    OddRun run;
    run.ranks = 3;
    run.dtype = DataType::bfloat16;
    run.stage = setting.stage;
    run.gather_for = setting.gather_for;
    run.persistent = setting.persistent;
    run.offload.parameters = setting.parameters;
    run.offload.nvme_path = nvme_folder();
    return run;
  };
  const auto steps = [](Engine& engine, Runtime& runtime, int last) {
    while (engine.steps() < last) {
      whole_step(engine, runtime, engine.steps());
      EXPECT_TRUE(engine.step().applied);
    }
  };
  const kernels::Digest expected =
      digest_after(run_of(settings[0]), [&](Engine& engine, Runtime& runtime) { steps(engine, runtime, 4); });
  for (std::size_t s = 0; s < std::size(settings); ++s) {
    const std::string folder = path(std::to_string(s));
    std::filesystem::create_directories(folder);
    const OddRun saved = run_of(settings[s]), resumed = run_of(settings[(s + 1) % std::size(settings)]);
    on_ranks(saved, [&](Engine& engine, Runtime& runtime) {
      steps(engine, runtime, 2);
      engine.save(folder, {.wait = true});
    });
    EXPECT_EQ(expected, digest_after(resumed,
                                     [&](Engine& engine, Runtime& runtime) {
                                       engine.load(folder);
                                       (void)engine.weights_digest();  // throws unless whole copies are equal
                                       steps(engine, runtime, 4);
                                     }))
        << saved.to_string() << " then " << resumed.to_string();
  }
}

/// The table at the start of rank 0 on the meta device.
std::string table_of_start(const std::function<void(Config&)>& change, int ranks = 2) {
  OddRun run;
  run.ranks = ranks;
  run.stage = 3;
  run.dtype = DataType::bfloat16;
  Config config = odd_config(run);
  config.accumulation_steps = 4;
  config.train_batch_size = 0;
  change(config);
  RuntimeOptions options;
  options.device = DeviceKind::meta;
  options.staging_bytes = config.staging_bytes;
  Runtime runtime(options, [&](const CommunicatorOptions& communicator) {
    return make_meta_communicator(0, ranks, ranks, communicator);
  });
  return Engine(runtime, odd_model(), config).summary();
}

TEST(GatherForNotes, SayWhatIsKeptAndWhatHasNoEffect) {
  const auto step = [](Config& config) { config.gather_for = GatherFor::step; };
  EXPECT_THAT(table_of_start([](Config&) {}),
              AllOf(HasSubstr("up to 2 x 3.00 KiB gathered"), Not(HasSubstr("gather_for")),
                    Not(HasSubstr("persistence"))));
  // 512 + 1536 + 512 + 512 trainable and 512 frozen elements.
  EXPECT_THAT(table_of_start(step), AllOf(HasSubstr("7.00 KiB gathered, kept for the step"),
                                          HasSubstr(" + 3.50 KiB parameters\n")));
  EXPECT_THAT(table_of_start(step, 1),
              HasSubstr("tranche.gather_for: step has no effect: every rank has all weights"));
  EXPECT_THAT(table_of_start([&](Config& c) { step(c), c.overlap = false; }),
              HasSubstr("zero_optimization.overlap_comm false: no unit is prefetched, and the first use of "
                        "each in a step waits for its gather"));
  EXPECT_THAT(table_of_start([&](Config& c) { step(c), c.depth = 1; }),
              HasSubstr("tranche.depth 1: no unit"));
  EXPECT_THAT(table_of_start([&](Config& c) { step(c), c.max_live_elements = 3583; }),
              HasSubstr("zero_optimization.stage3_max_live_parameters 3583 bounds prefetching alone: "
                        "tranche.gather_for step keeps all 3584 elements gathered"));
  EXPECT_THAT(table_of_start([&](Config& c) { step(c), c.device_memory_limit = 64 << 10; }),
              HasSubstr("less than the 7.00 KiB of all units, which tranche.gather_for step keeps: the run "
                        "will end out of memory; tranche.gather_for use gathers them anew for each use"));
}

TEST(GatherForNotes, SayWhatStaysWholeAndItsPrice) {
  EXPECT_THAT(table_of_start([](Config& c) { c.persistent_tensor_elements = 192; }),
              AllOf(HasSubstr("zero_optimization.stage3_param_persistence_threshold 192 keeps 333 elements "
                              "of 3 of 4 units whole on every rank: they take 1.50 KiB more than their "
                              "shards, and only new weights are gathered, after the update"),
                    HasSubstr("up to 2 x 3.00 KiB gathered")));
  EXPECT_THAT(table_of_start([](Config& c) { c.persistent_tensor_elements = 2; }),
              HasSubstr("stage3_param_persistence_threshold 2 keeps nothing whole: a unit's tensors are "
                        "gathered together, and every unit has a larger tensor"));
  EXPECT_THAT(table_of_start([](Config& c) { c.persistent_tensor_elements = 192; }, 1),
              Not(HasSubstr("persistence")));
}

}  // namespace
}  // namespace tranche::test
