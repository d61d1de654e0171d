// Law 4: a checkpoint saved by any number of ranks at any stage is loaded by any other with the same bits.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "offload/file_system.h"
#include "on_ranks.h"
#include "saving_fixture.h"
#include "tests/core/rounds.h"

namespace tranche::test {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t global_batch = 24;  // divisible by every number of ranks here

OddRun setup(int ranks, int stage, DataType dtype) {
  OddRun run;
  run.ranks = ranks;
  run.stage = stage;
  run.dtype = dtype;
  run.samples_per_micro_batch = global_batch / ranks;
  run.policy = ReductionPolicy::micro_batch;  // gives the same arithmetic in every stage
  return run;
}

struct Outcome {
  kernels::Digest state, weights;
  std::vector<double> losses;
  LoadResult loaded;
};

/// Loads (unless `from` is empty), trains up to step `last`, and saves (unless `to` is empty).
Outcome train(const OddRun& run, const std::string& from, std::int64_t last, const std::string& to,
              const LoadOptions& how = {}) {
  Outcome outcome;
  std::mutex mutex;
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    LoadResult loaded;
    kernels::Digest after_loading;
    if (!from.empty()) {
      loaded = engine.load(from, how);
      after_loading = engine.state_digest();
    }
    std::vector<double> losses;
    while (engine.steps() < last) {
      odd_micro_batch(engine, engine.steps() * global_batch + runtime.rank() * run.samples_per_micro_batch,
                      run.samples_per_micro_batch);
      losses.push_back(engine.step().loss);
    }
    const kernels::Digest state = engine.state_digest(), weights = engine.weights_digest();
    if (!to.empty()) engine.save(to, {.user = R"({"mine": 7})", .wait = true});
    const std::lock_guard lock(mutex);
    if (runtime.rank() == 0) outcome = {from.empty() ? state : after_loading, weights, losses, loaded};
  });
  return outcome;
}

TEST_F(Saving, AnyNumberOfRanksAndStageGoOnFromAnyOther) {
  int pair = 0;
  for (const int n : {1, 2, 3, 4, 8}) {
    for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
      if (dtype == DataType::bfloat16 && n != 2 && n != 3)
        continue;  // only another copy of the weights, left out to save time
      const int stage = n % 4;
      const std::string folder = path(std::to_string(n) + std::string(name_of(dtype)));
      const Outcome saved = train(setup(n, stage, dtype), {}, 3, folder);
      const Outcome whole = train(setup(n, stage, dtype), {}, 13, {});
      for (const int m : {1, 2, 3, 4, 8}) {
        if (!swept(pair++, 3)) continue;
        const OddRun run = setup(m, (stage + 1 + m) % 4, dtype);
        const Outcome resumed = train(run, folder, 13, {});
        const std::string what =
            std::to_string(n) + " ranks, stage " + std::to_string(stage) + " -> " + run.to_string();
        EXPECT_EQ(resumed.state, saved.state) << what;
        EXPECT_EQ(resumed.loaded.step, 3) << what;
        EXPECT_EQ(resumed.loaded.world, n) << what;
        EXPECT_EQ(resumed.loaded.samples, 3 * global_batch) << what;
        EXPECT_THAT(resumed.loaded.user, HasSubstr("\"mine\"")) << what;
        ASSERT_EQ(resumed.losses.size(), 10u) << what;
        for (std::size_t s = 0; s < 10; ++s) {
          if (n == m) {
            EXPECT_EQ(resumed.losses[s], whole.losses[3 + s]) << what << " step " << 4 + s;
          } else {
            // bf16 rounds the gradients of other micro-batches, so only fp32 has the law's bound.
            const double bound = dtype == DataType::float32 ? 1e-5 : 1e-2;
            EXPECT_NEAR(resumed.losses[s], whole.losses[3 + s], bound * whole.losses[3 + s]) << what;
          }
        }
        if (n == m) {
          EXPECT_EQ(resumed.weights, whole.weights) << what;
        }
        EXPECT_EQ(resumed.loaded.notes.empty(), n == m) << what;
      }
    }
  }
}

TEST_F(Saving, TheNewestOfAFolderIsTakenAndOldOnesGo) {
  const OddRun run = setup(2, 2, DataType::float32);
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    for (int step = 0; step < 4; ++step) {
      odd_micro_batch(engine, step * global_batch + runtime.rank() * 12, 12);
      (void)engine.step();
      engine.save(path(), {.keep_last = 2, .wait = true});
    }
  });
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(path()))
    names.push_back(entry.path().filename());
  EXPECT_THAT(names, ::testing::UnorderedElementsAre("step-00000003", "step-00000004", "latest", "run.lock"));
  EXPECT_EQ(train(run, path(), 4, {}).loaded.step, 4);
  EXPECT_EQ(train(run, path("step-00000003"), 3, {}).loaded.step, 3);
}

/// Damages a byte, which only reading reveals.
void damage(const std::string& file_path) {
  std::fstream file(file_path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(0, std::ios::end);
  const auto middle = static_cast<std::int64_t>(file.tellg()) / 2;
  file.seekg(middle);
  const char byte = static_cast<char>(file.get());
  file.seekp(middle);
  file.put(static_cast<char>(byte ^ 0x40));
}

TEST_F(Saving, ADamagedNewestOneIsPassedOverWhenAskedTo) {
  const OddRun run = setup(2, 1, DataType::float32);
  (void)train(run, {}, 2, path());
  const Outcome third = train(run, path(), 3, path());
  (void)train(run, path(), 5, path());
  damage(path("step-00000005/shard-00001-of-00002.h5"));
  on_ranks(run, [&](Engine& engine, Runtime&) {
    const LoadResult loaded = engine.load(path(), {.pass_over_damaged = true});
    EXPECT_EQ(loaded.folder, path("step-00000003"));
    EXPECT_EQ(engine.steps(), 3);
    EXPECT_EQ(engine.weights_digest(), third.weights);
    EXPECT_THAT(loaded.notes,
                ::testing::Contains(AllOf(HasSubstr("passed over: "), HasSubstr("step-00000005"),
                                          HasSubstr("shard-00001-of-00002.h5"))));
    // A checkpoint that is named must be used, and no other.
    EXPECT_THAT(
        message_of<CheckpointError>([&] { engine.load(path("step-00000005"), {.pass_over_damaged = true}); }),
        HasSubstr("shard-00001-of-00002.h5"));
  });
}

TEST_F(Saving, ADamagedOneTakesNoPlaceOfThoseThatAreKept) {
  const OddRun run = setup(2, 1, DataType::float32);
  const auto kept = [&] {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path())) {
      if (entry.is_directory()) names.push_back(entry.path().filename());
    }
    return names;
  };
  // The step after a save proves its weights; older ones are removed only then.
  const auto save_after = [&](Engine& engine, Runtime& runtime, int saved, int keep) {
    for (const int last : {saved, saved + 1}) {
      while (engine.steps() < last) {
        odd_micro_batch(engine, engine.samples() + runtime.rank() * 12, 12);
        (void)engine.step();
      }
      if (last == saved) engine.save(path(), {.keep_last = keep, .wait = true});
    }
    engine.finish_saving();
  };
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    for (const int step : {1, 3, 6}) save_after(engine, runtime, step, 0);
  });
  damage(path("step-00000006/shard-00001-of-00002.h5"));
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    EXPECT_EQ(engine.load(path(), {.pass_over_damaged = true}).step, 3);
    save_after(engine, runtime, 4, 2);
    if (runtime.rank() == 0) {
      EXPECT_THAT(kept(), ::testing::UnorderedElementsAre("step-00000003", "step-00000004", "step-00000006"))
          << "the two newest that are whole, and the damaged one";
    }
    save_after(engine, runtime, 6, 2);  // replaces the damaged one
    save_after(engine, runtime, 8, 2);
    if (runtime.rank() == 0) {
      EXPECT_THAT(kept(), ::testing::UnorderedElementsAre("step-00000006", "step-00000008"));
    }
  });
}

TEST_F(Saving, ARunRemovesAndReplacesOnlyWhatItAndItsAncestorsWrote) {
  const OddRun run = setup(2, 1, DataType::float32);
  (void)train(run, {}, 1, path());      // a first run...
  (void)train(run, path(), 2, path());  // ...and one that goes on from it
  const auto step_to = [](Engine& engine, Runtime& runtime, int last) {
    while (engine.steps() < last) {
      odd_micro_batch(engine, engine.samples() + runtime.rank() * 12, 12);
      (void)engine.step();
    }
  };
  const auto checkpoints = [&] {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path())) {
      if (entry.is_directory()) names.push_back(entry.path().filename());
    }
    return names;
  };
  using ::testing::UnorderedElementsAre;
  const SaveOptions one{.keep_last = 1, .wait = true};
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {  // an unrelated run
    step_to(engine, runtime, 2);
    EXPECT_THAT(message_of<CheckpointError>([&] { engine.save(path(), one); }),
                HasSubstr("step-00000002 belongs to another run, which this run does not continue: give this "
                          "run a folder"));
    step_to(engine, runtime, 3);
    engine.save(path(), one);
  });
  EXPECT_THAT(checkpoints(), UnorderedElementsAre("step-00000001", "step-00000002", "step-00000003"));
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    (void)engine.load(path("step-00000002"));
    step_to(engine, runtime, 4);
    engine.save(path(), one);
    step_to(engine, runtime, 5);  // proves that its weights are sound
    engine.finish_saving();
  });
  EXPECT_THAT(checkpoints(), UnorderedElementsAre("step-00000003", "step-00000004"));
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {  // loads only the weights
    (void)engine.load(path("step-00000004"), {.weights_only = true});
    step_to(engine, runtime, 1);
    engine.save(path(), one);
  });
  EXPECT_THAT(checkpoints(), UnorderedElementsAre("step-00000001", "step-00000003", "step-00000004"))
      << "weights alone begin a new run";
}

TEST_F(Saving, OlderCheckpointsStayUntilTheNewestIsProven) {
  OddRun run = setup(2, 3, DataType::bfloat16);
  const auto steps = [&] {
    std::vector<std::int64_t> found;
    for (const auto& listed : checkpoint::list_checkpoints(detail::posix_file_system(), path()))
      found.push_back(listed.step);
    return found;
  };
  const SaveOptions one{.keep_last = 1, .wait = true};
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    const auto step = [&](const std::string& poison = {}) {
      for (std::int64_t m = 0; m < engine.config().accumulation_steps; ++m) {
        odd_micro_batch(engine, engine.samples() + runtime.rank() * 12, 12, poison);
      }
      return engine.step();
    };
    const auto expect = [&](std::vector<std::int64_t> wanted, const char* why) {
      runtime.all().barrier({"", "test"}).wait();
      if (runtime.rank() == 0) {
        EXPECT_EQ(steps(), wanted) << why;
      }
      runtime.all().barrier({"", "test"}).wait();
    };
    EXPECT_TRUE(step().applied);
    engine.save(path(), one);
    EXPECT_TRUE(step().applied);
    engine.save(path(), one);
    expect({2, 1}, "nothing has been computed from the weights of step 2 yet");
    EXPECT_FALSE(step("prime.c").applied);
    engine.finish_saving();
    expect({2, 1}, "a step that is skipped shows nothing good of them");
    EXPECT_EQ(engine.skipped_at_end(), 1);
    EXPECT_TRUE(engine.in_doubt()) << "a gradient that is not finite, without loss scaling";
    EXPECT_TRUE(step().applied);
    EXPECT_EQ(engine.skipped_at_end(), 0);
    EXPECT_FALSE(engine.in_doubt());
    engine.finish_saving();
    expect({2}, "a step has been taken from them");
    EXPECT_FALSE(step("prime.c").applied);
    engine.save(path(), {.keep_last = 1, .wait = true});
    expect({5, 2}, "one whose last step was skipped takes the place of none");
    if (runtime.rank() == 0) {
      std::ifstream latest(path("latest"));
      EXPECT_THAT(std::string(std::istreambuf_iterator<char>(latest), {}), HasSubstr("step-00000002"));
    }
    EXPECT_EQ(engine.load(path()).step, 2) << "and of a folder the newest that is not in doubt is taken";
    const LoadResult named = engine.load(path("step-00000005"));
    EXPECT_EQ(named.step, 5);
    EXPECT_THAT(named.notes, ::testing::Contains(HasSubstr("may be ruined")));
    EXPECT_TRUE(engine.in_doubt());
    EXPECT_EQ(engine.skipped_at_end(), 1);
    // Steps from loaded weights do not prove that the state saved before the load is sound.
    for (const bool weights_only : {false, true}) {
      (void)engine.load(path("step-00000002"), {});
      EXPECT_FALSE(step("prime.c").applied);
      engine.save(path(), one);
      expect({3, 2}, "the newest whose last step was taken stays");
      (void)engine.load(path("step-00000002"), {.weights_only = weights_only});
      EXPECT_TRUE(step().applied);
      engine.finish_saving();
      expect({3, 2}, "other weights were trained");
    }
    // Nor do steps and losses with weights that the program wrote, such as an average.
    (void)engine.load(path("step-00000002"), {});
    EXPECT_TRUE(step().applied);
    engine.save(path(), one);
    expect({3, 2}, "not proven yet");
    const std::vector<float> kept = engine.read_weight("prime.d");
    engine.write_weight("prime.d", std::vector<float>{std::numeric_limits<float>::quiet_NaN()});
    engine.begin_evaluation();
    engine.begin_micro_batch();
    end_with(engine, std::numeric_limits<double>::quiet_NaN(), 3);
    (void)engine.end_evaluation();
    EXPECT_FALSE(engine.in_doubt()) << "that is a loss of the written weights";
    engine.write_weight("prime.d", kept);
    EXPECT_TRUE(step().applied);
    engine.finish_saving();
    expect({3, 2}, "weights were written in between");
    engine.save(path(), {.keep_last = 1});
    engine.write_weight("prime.d", kept);  // while the save is being written
    EXPECT_TRUE(step().applied);
    engine.finish_saving();
    expect({4, 3}, "the newest is not proven, and the one before it is older and sound");
  });
}

TEST_F(Saving, WeightsAloneStartAnew) {
  const OddRun run = setup(2, 1, DataType::bfloat16);
  const Outcome saved = train(run, {}, 3, path());
  on_ranks(setup(3, 3, DataType::bfloat16), [&](Engine& engine, Runtime&) {
    const LoadResult loaded = engine.load(path(), {.weights_only = true});
    EXPECT_EQ(loaded.step, 3);
    EXPECT_EQ(engine.steps(), 0);
    EXPECT_EQ(engine.weights_digest(), saved.weights);
    const std::vector<float> moments = engine.read_optimizer_state("prime.c", "exp_avg");
    EXPECT_EQ(moments, std::vector<float>(moments.size(), 0.0f));
  });
}

TEST_F(Saving, StatesThatAnotherOptimizerHasNoUseForAreNamed) {
  const OddRun run = setup(2, 1, DataType::bfloat16);
  (void)train(run, {}, 2, path());
  on_ranks(
      run,
      [&](Engine& engine, Runtime&) {
        const LoadResult loaded = engine.load(path());
        EXPECT_THAT(loaded.notes, ::testing::Contains(
                                      "optimizer SGD has no use for exp_avg, exp_avg_sq of " + loaded.folder +
                                      " (saved by AdamW): dropped, and not in later checkpoints"));
      },
      [](Config& config, RuntimeOptions&) { config.optimizer = {.type = "SGD"}; });
  EXPECT_THAT(train(run, path(), 3, {}).loaded.notes, ::testing::IsEmpty());
  EXPECT_THAT(train(run, path(), 3, {}, {.weights_only = true}).loaded.notes, ::testing::IsEmpty())
      << "all else begins anew there";
}

TEST_F(Saving, StatesOfTensorsThatAreFrozenNowAreNamed) {
  const OddRun run = setup(2, 1, DataType::bfloat16);
  (void)train(run, {}, 2, path());
  const auto note_with = [&](const std::string& pattern, bool weights_only) {
    std::vector<std::string> notes;
    on_ranks(
        run,
        [&](Engine& engine, Runtime& runtime) {
          const LoadResult loaded = engine.load(path(), {.weights_only = weights_only});
          if (runtime.rank() == 0) notes = loaded.notes;
        },
        [&](Config& config, RuntimeOptions&) { config.frozen.push_back(pattern); });
    return notes;
  };
  const std::string dropped = " frozen now: exp_avg, exp_avg_sq of " + path("step-00000002") +
                              " dropped, and not in later checkpoints";
  EXPECT_THAT(note_with("prime.c", false), ::testing::Contains("prime.c is" + dropped));
  EXPECT_THAT(note_with("prime.*", false), ::testing::Contains("prime.c and 1 more are" + dropped));
  EXPECT_THAT(note_with("prime.c", true), ::testing::IsEmpty());
}

TEST_F(Saving, DefaultsOfEarlierVersionsThatAConfigurationDoesNotSpeakOfAreSaid) {
  (void)train(setup(1, 0, DataType::bfloat16), {}, 2, path());
  const auto notes = [&](bool given) {
    std::vector<std::string> said;
    on_ranks(
        setup(1, 0, DataType::float32), [&](Engine& engine, Runtime&) { said = engine.load(path()).notes; },
        [&](Config& config, RuntimeOptions&) {
          config.gradient_clipping = 0;
          config.precision_given = config.clipping_given = given;
        });
    return said;
  };
  EXPECT_THAT(
      notes(false),
      ::testing::IsSupersetOf(
          {"bf16.enabled: not given, which is fp32; the run was saved in bf16: write it to choose",
           "gradient_clipping: not given, which is off; the run was saved with 1.0: write it to choose"}));
  EXPECT_THAT(notes(true), ::testing::Not(::testing::Contains(HasSubstr("not given"))));
}

TEST_F(Saving, LossScalingBeginsAnewWhereTheSavedRunHadNone) {
  (void)train(setup(2, 1, DataType::bfloat16), {}, 2, path());
  on_ranks(setup(2, 1, DataType::float16), [&](Engine& engine, Runtime& runtime) {
    const auto scale_of_a_step = [&] {
      odd_micro_batch(engine, engine.samples() + runtime.rank() * 12, 12);
      return engine.step().loss_scale;
    };
    const double fresh = scale_of_a_step();
    EXPECT_GT(fresh, 1);
    const LoadResult loaded = engine.load(path());
    EXPECT_THAT(loaded.notes, ::testing::Contains(HasSubstr("saved without loss scaling")));
    EXPECT_EQ(scale_of_a_step(), fresh);
  });
}

TEST_F(Saving, WhatDoesNotFitIsRefusedOnAllRanksAndChangesNothing) {
  OddRun run = setup(2, 0, DataType::float32);
  (void)train(run, {}, 1, path());
  OddRun other = run;
  other.single_unit = true;
  other.frozen = false;
  OddRun momentum = run;
  momentum.optimizer = "SGD";
  const auto refusal = [&](const OddRun& with, const std::string& from) {
    std::string text;
    std::mutex mutex;
    on_ranks(with, [&](Engine& engine, Runtime& runtime) {
      const kernels::Digest before = engine.state_digest();
      const std::string message = message_of<CheckpointError>([&] { engine.load(from); });
      EXPECT_EQ(engine.state_digest(), before);
      const std::lock_guard lock(mutex);
      EXPECT_THAT(message, HasSubstr("rank 0")) << "told by rank " << runtime.rank();
      text = message;
    });
    return text;
  };
  EXPECT_THAT(refusal(other, path()), HasSubstr("holds tensor prime.c, which this model does not have"));
  EXPECT_THAT(refusal(momentum, path()), HasSubstr("optimizer SGD needs momentum_buffer of tensor tied.a"));
  EXPECT_THAT(refusal(run, path("nowhere")), HasSubstr("nowhere"));
  // Flips a bit in a byte that rank 1 reads.
  damage(path("step-00000001/shard-00001-of-00002.h5"));
  on_ranks(run, [&](Engine& engine, Runtime&) {
    EXPECT_THAT(message_of<CheckpointError>([&] { engine.load(path()); }),
                HasSubstr("shard-00001-of-00002.h5"));
    EXPECT_THAT(message_of<CheckpointError>([&] { engine.load(path(), {.pass_over_damaged = true}); }),
                AllOf(HasSubstr("there is no complete checkpoint in"), HasSubstr("passed over: "),
                      HasSubstr("shard-00001-of-00002.h5")));
    // Some of the weights may be new, so that training and saving are refused.
    EXPECT_THAT(message_of<LogicError>([&] { engine.begin_micro_batch(); }), HasSubstr("failed half-way"));
    EXPECT_THAT(message_of<LogicError>([&] { engine.save(path("half")); }), HasSubstr("failed half-way"));
  });
}

TEST_F(Saving, AFolderThatCannotBeWrittenIsNamedAndTrainingGoesOn) {
  std::filesystem::create_directories(path());
  const std::string file = path("file");
  std::ofstream(file) << "not a folder";
  on_ranks(setup(2, 3, DataType::float32), [&](Engine& engine, Runtime& runtime) {
    EXPECT_THAT(message_of<CheckpointError>([&] { engine.save(file + "/run", {.wait = true}); }),
                ::testing::AllOf(HasSubstr("cannot save step 0"), HasSubstr(file)));
    odd_micro_batch(engine, runtime.rank() * 12, 12);
    EXPECT_TRUE(engine.step().applied);
    EXPECT_THAT(message_of<LogicError>([&] {
                  engine.begin_micro_batch();
                  engine.save(path());
                }),
                HasSubstr("save() inside a step"));
  });
}

}  // namespace
}  // namespace tranche::test
