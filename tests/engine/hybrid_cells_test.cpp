// Hybrid sharding together with the engine's other features: with each of them replicas have the bits of one
// sharded model, and failures name ranks by their coordinates.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "on_ranks.h"
#include "same_bits.h"
#include "tests/core/rounds.h"
#include "tests/offload/test_folder.h"

namespace tranche::test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int ranks_of_a_copy = 2;
constexpr const char* two_by_two = "replicate=2, shard=2";

OddRun of_four() {
  OddRun run;
  run.ranks = 4;
  run.dtype = DataType::bfloat16;
  run.accumulation = 2;
  run.reduction_group = ranks_of_a_copy;
  run.offload.nvme_path = std::filesystem::temp_directory_path().string();
  run.offload.tile_elements = 4096;
  return run;
}

/// Expects the state after `body` to be equal with replicas and with one model that all ranks shard.
void expect_digests_equal(OddRun run, const std::function<void(Engine&, Runtime&)>& body) {
  const kernels::Digest flat = digest_after(run, body);
  run.mesh = two_by_two;
  EXPECT_EQ(digest_after(run, body), flat) << run.to_string();
}

TEST(HybridCells, HaveTheBitsOfOneShardedModel) {
  const std::pair<const char*, std::function<void(OddRun&)>> cells[] = {
      {"optimizer on nvme", [](OddRun& run) { run.offload.optimizer = OffloadTier::nvme; }},
      {"half of the optimizer on the host",
       [](OddRun& run) { run.offload.optimizer = OffloadTier::cpu, run.offload.ratio = 0.5; }},
      {"parameters on the host",
       [](OddRun& run) { run.stage = 3, run.offload.parameters = OffloadTier::cpu; }},
      {"all on nvme",
       [](OddRun& run) {
         run.stage = 3, run.accumulation = 1;
         run.offload.optimizer = run.offload.parameters = OffloadTier::nvme;
       }},
      {"no overlap", [](OddRun& run) { run.overlap = false, run.stage = 3; }},
      {"no overlap, small buckets",
       [](OddRun& run) { run.overlap = false, run.reduce_bucket = run.gather_bucket = 300; }},
      {"poisoned memory, depth 1", [](OddRun& run) { run.poison = true, run.stage = 3, run.depth = 1; }},
      {"unplanned memory, bf16 sums",
       [](OddRun& run) { run.plan_memory = false, run.accumulation_dtype = DataType::bfloat16; }},
      {"fp16 with a loss scale", [](OddRun& run) { run.dtype = DataType::float16, run.stage = 1; }},
      {"two nodes", [](OddRun& run) { run.ranks_per_host = 2; }},
      {"nodes across the copies", [](OddRun& run) { run.ranks_per_host = 3, run.collectives = "messages"; }},
  };
  for (const auto& [name, change] : cells) {
    for (const ReductionPolicy policy : {ReductionPolicy::boundary, ReductionPolicy::micro_batch}) {
      SCOPED_TRACE(name);
      OddRun run = of_four();
      run.stage = 2;
      run.policy = policy;
      change(run);
      const OddResult flat = train_odd(run);
      run.mesh = two_by_two;
      const OddResult copies = train_odd(run);
      expect_same(flat, copies, run);
      EXPECT_EQ(copies.wire_elements, copies.formula_elements) << run.to_string();
      EXPECT_EQ(copies.wire_bytes, copies.formula_bytes) << run.to_string();
    }
  }
}

TEST(HybridCells, GradientsAreReadAndWrittenAsOfOneModel) {
  int point = 0;
  for (const int stage : {0, 1, 2, 3}) {
    for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu}) {
      for (const bool in_hook : {false, true}) {
        if (!swept(point++, 5)) continue;
        OddRun run = of_four();
        run.stage = stage;
        run.offload.optimizer = tier;
        expect_digests_equal(run, [&](Engine& engine, Runtime& runtime) {
          const auto halve = [&engine] {
            for (const char* name : {"tied.b", "prime.c", "tiny.e"}) {
              std::vector<float> values = engine.read_gradient(name);
              for (float& value : values) value *= 0.5f;
              engine.write_gradient(name, values);
            }
          };
          if (in_hook) {
            engine.set_gradient_hook([&](const StepResult&) {
              halve();
              return std::string();
            });
          }
          for (int step = 0; step < 3; ++step) {
            whole_step(engine, runtime, step);
            if (!in_hook) halve();
            EXPECT_TRUE(engine.step().applied);
          }
        });
      }
    }
  }
}

TEST(HybridCells, ABatchMayChangeAndEvaluationsMayLieBetween) {
  for (const int stage : {0, 2, 3}) {
    OddRun run = of_four();
    run.stage = stage;
    run.accumulation = 1;
    std::vector<double> losses;
    expect_digests_equal(run, [&](Engine& engine, Runtime& runtime) {
      for (int step = 0; step < 6; ++step) {
        if (step == 2) engine.set_batch(run.samples_per_micro_batch, 3);
        if (step == 4) engine.set_batch(run.samples_per_micro_batch, 2);
        whole_step(engine, runtime, step);
        EXPECT_TRUE(engine.step().applied);
        if (step % 2 == 0) continue;
        engine.begin_evaluation();
        engine.begin_micro_batch();
        double weight = 0;
        for (int unit = 3; unit >= 0; --unit) {
          const GatheredUnit held = engine.gather({unit});
          weight += to_float(held.tensor(0).as<bfloat16>()[0]);
        }
        end_with(engine, weight * (runtime.rank() + 1), runtime.rank() + 1);
        const EvaluationResult result = engine.end_evaluation();
        EXPECT_EQ(result.tokens, 10);
        if (runtime.rank() == 0) losses.push_back(result.loss);
      }
    });
    ASSERT_EQ(losses.size(), 6u);
    for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(losses[i], losses[3 + i]) << "of the flat run";
  }
}

TEST(HybridCells, SavesGoOnBehindSteps) {
  const testing::TestFolder folder;
  for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
    OddRun run = of_four();
    run.stage = 2;
    run.mesh = two_by_two;
    run.offload.optimizer = tier;
    kernels::Digest saved;
    std::string path;
    on_ranks(run, [&](Engine& engine, Runtime& runtime) {
      whole_step(engine, runtime, 0);
      (void)engine.step();
      const kernels::Digest digest = engine.state_digest();
      (void)engine.save(folder.path() + "/" + std::string(name_of(tier)));
      whole_step(engine, runtime, 1);
      (void)engine.step();
      const std::string written = engine.finish_saving();
      if (runtime.rank() == 0) saved = digest, path = written;
    });
    on_ranks(run, [&](Engine& engine, Runtime&) {
      EXPECT_EQ(engine.load(path).step, 1);
      EXPECT_EQ(engine.state_digest(), saved) << run.to_string();
    });
  }
}

TEST(HybridCells, ARunGoesOnAsOneShardedModelWithTheSameBits) {
  const testing::TestFolder folder;
  OddRun run = of_four();
  run.stage = 2;
  run.mesh = two_by_two;
  run.reduction_group = 0;
  kernels::Digest expected;
  std::string path;
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    whole_step(engine, runtime, 0);
    (void)engine.step();
    const std::string written = engine.save(folder.path(), {.wait = true});
    whole_step(engine, runtime, 1);
    (void)engine.step();
    const kernels::Digest digest = engine.state_digest();
    if (runtime.rank() == 0) expected = digest, path = written;
  });
  for (const char* mesh : {"", "shard=*", two_by_two, "shard=2, replicate=*"}) {
    run.mesh = mesh;
    on_ranks(run, [&](Engine& engine, Runtime& runtime) {
      EXPECT_THAT(engine.load(path).notes, IsEmpty()) << mesh;
      whole_step(engine, runtime, 1);
      (void)engine.step();
      // Ranks that are neighbours on another axis have the same samples in other groups.
      if (runtime.mesh().coordinate(MeshAxis::shard, 1) == 1) {
        EXPECT_EQ(engine.state_digest(), expected) << mesh;
      }
    });
  }
  run.ranks = 2;
  run.mesh = "";
  on_ranks(run, [&](Engine& engine, Runtime&) {
    EXPECT_THAT(
        engine.load(path).notes,
        ::testing::ElementsAre("saved by 4 ranks (replicate=2, shard=2), loaded by 2: state is equal to "
                               "the bit, sums over ranks round differently from here on"));
  });
}

TEST(HybridCells, AConfigurationsMeshIsReadBack) {
  const Config config = parse_config(R"({"tranche": {"mesh": "shard=2, replicate=*"}})", 6);
  EXPECT_EQ(parse_config(config.to_json(), 6).mesh, "shard=2, replicate=*");
  EXPECT_EQ(parse_config(config.to_json(), 6).to_json(), config.to_json());
}

TEST(HybridCells, ARankOfTheSecondCopyThatFailsIsNamed) {
  for (const int stage : {0, 3}) {
    OddRun run = of_four();
    run.stage = stage;
    run.mesh = two_by_two;
    std::vector<std::string> told(4);
    EXPECT_THAT(message_of<std::runtime_error>([&] {
                  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
                    whole_step(engine, runtime, 0);
                    (void)engine.step();
                    const auto meet = [&] { runtime.all().barrier({"", "test", Traffic::control}).wait(); };
                    if (runtime.rank() == 3) {
                      meet();
                      const auto error = std::make_exception_ptr(std::runtime_error("no more samples"));
                      (void)engine.fail(error);
                      std::rethrow_exception(error);
                    }
                    told[static_cast<std::size_t>(runtime.rank())] = message_of<CommunicationError>([&] {
                      meet();
                      whole_step(engine, runtime, 1);
                      (void)engine.step();
                    });
                  });
                }),
                HasSubstr("no more samples"));
    told.pop_back();
    EXPECT_THAT(told, ::testing::Each(HasSubstr("rank 3 (replicate 1, shard 1) failed: no more samples")))
        << run.to_string();
  }
}

TEST(HybridCells, TheRankWhoseCopyDiffersIsNamedOnAllRanks) {
  const auto told_by_all = [](const OddRun& run, const std::function<void(Engine&, Runtime&)>& damage) {
    std::vector<std::string> told(static_cast<std::size_t>(run.ranks));
    on_ranks(run, [&](Engine& engine, Runtime& runtime) {
      damage(engine, runtime);
      told[static_cast<std::size_t>(runtime.rank())] =
          message_of<CommunicationError>([&] { (void)engine.weights_digest(); });
    });
    EXPECT_THAT(told, ::testing::Each(told[0])) << run.to_string();
    return told[0];
  };
  const auto writes_other = [](int first) {
    return [first](Engine& engine, Runtime& runtime) {
      const std::vector<float> values(3, runtime.rank() >= first ? 1.0f : 2.0f);
      engine.write_weight("tiny.e", values);
    };
  };
  for (const int stage : {0, 1, 2, 3}) {
    OddRun run = of_four();
    run.stage = stage;
    run.mesh = two_by_two;
    EXPECT_THAT(told_by_all(run, writes_other(2)),
                HasSubstr("replicas differ: rank 2 (replicate 1, shard 0) holds other weights"))
        << run.to_string();
    run.mesh = "replicate=4, shard=1";
    run.reduction_group = 0;
    EXPECT_THAT(told_by_all(run, writes_other(3)), HasSubstr("replicas differ: rank 3 holds other weights"));
  }
  OddRun run = of_four();
  run.mesh = two_by_two;
  EXPECT_EQ(told_by_all(run, writes_other(3)),
            "replicas differ: rank 3 (replicate 1, shard 1) holds other weights than rank 0 (replicate 0, "
            "shard 0)")
      << "though the first copy is whole";
  // A rank without peers keeps its 16-bit weights in separate memory; the fp32 ones are unchanged.
  run.mesh = "replicate=4, shard=1";
  run.reduction_group = 0;
  EXPECT_EQ(told_by_all(run,
                        [](Engine& engine, Runtime& runtime) {
                          const InferenceScope forward(engine);
                          const GatheredUnit held = engine.gather({1});
                          void* weights = const_cast<void*>(held.tensor(0).data);
                          if (runtime.rank() == 2) *static_cast<bfloat16*>(weights) = to_bfloat16(77.0f);
                        }),
            "replicas differ: rank 2 holds other weights than rank 0");
}

}  // namespace
}  // namespace tranche::test
