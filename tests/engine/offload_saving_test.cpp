// Saves of state on the nvme tier: the checkpoint gets the tiles from the reads of the next step, before they
// change, and nothing waits for reads that never happen.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <mutex>
#include <optional>

#include "../offload/faulty_file_system.h"
#include "offload_saving_fixture.h"
#include "on_ranks.h"
#include "tests/core/rounds.h"

namespace tranche::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using tranche::testing::Fault;
using tranche::testing::FaultyFileSystem;
using tranche::testing::FileOperation;
namespace fs = std::filesystem;

Fault fault(FileOperation operation, int code, const std::string& where, int nth = 1, int times = -1) {
  Fault one;
  one.operation = operation;
  one.code = code;
  one.path_contains = where;
  one.nth = nth;
  one.times = times;
  return one;
}
void meet(Runtime& runtime) {
  runtime.all().barrier({"test", "faults", Traffic::control}).wait();
}

TEST_F(OffloadSaving, StepsGoOnAndTheCheckpointHoldsWhatWasThen) {
  int number = 0;
  for (const int ranks : {1, 2}) {
    for (const int stage : {0, 2, 3}) {
      for (const double ratio : {1.0, 0.5}) {
        for (const OffloadTier parameters : {OffloadTier::none, OffloadTier::nvme}) {
          if (parameters != OffloadTier::none && stage != 3) continue;
          for (const std::int64_t accumulation : {1, 2}) {
            const std::string folder = path(std::to_string(number++));
            if (!swept(number, 7)) continue;
            OddRun run = setup(ranks, stage, OffloadTier::nvme, parameters);
            run.offload.ratio = ratio;
            run.accumulation = accumulation;
            const std::string what = run.to_string();
            const int skipped = number % 2 == 0 ? 2 : -1;
            const std::vector<kernels::Digest> expected = undisturbed(run, 5, skipped);
            on_tiled_ranks(run, [&](Engine& engine, Runtime& runtime) {
              (void)one_step(engine, runtime);
              const OffloadTraffic usual = one_step(engine, runtime).offload_traffic;
              EXPECT_EQ(engine.save(folder), folder + "/step-00000002");
              EXPECT_TRUE(engine.saving());
              const StepResult behind = one_step(engine, runtime, skipped == 2 ? "prime.c" : "");
              EXPECT_EQ(behind.applied, skipped != 2);
              // The save causes no reads of its own.
              EXPECT_EQ(behind.offload_traffic.nvme_read, usual.nvme_read) << what;
              EXPECT_EQ(behind.offload_traffic.nvme_written, usual.nvme_written) << what;
              (void)one_step(engine, runtime);
              (void)one_step(engine, runtime);
              EXPECT_EQ(engine.state_digest(), expected[5]) << what;
              (void)engine.finish_saving();
            });
            EXPECT_EQ(stored(run, folder + "/step-00000002"), expected[2]) << what;
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

// Units are updated before the ranks agree, the tiles of the last one first: each is copied before its
// update.
TEST_F(OffloadSaving, UpdatesAsGradientsAreReducedLeaveTheCheckpointAsItWas) {
  for (const OffloadTier parameters : {OffloadTier::none, OffloadTier::nvme}) {
    OddRun run = setup(2, 3, OffloadTier::nvme, parameters);
    run.clipping = 0;
    const std::vector<kernels::Digest> expected = undisturbed(run, 5);
    run.update = UpdateTime::as_reduced;
    const std::string folder = path(std::string(name_of(parameters)));
    on_tiled_ranks(run, [&](Engine& engine, Runtime& runtime) {
      for (int step = 0; step < 2; ++step) (void)one_step(engine, runtime);
      engine.save(folder);
      EXPECT_TRUE(engine.saving());
      for (int step = 2; step < 5; ++step) (void)one_step(engine, runtime);
      EXPECT_EQ(engine.state_digest(), expected[5]);
      (void)engine.finish_saving();
      engine.load(folder + "/step-00000002");
      for (int step = 2; step < 5; ++step) (void)one_step(engine, runtime);
      EXPECT_EQ(engine.state_digest(), expected[5]);
    });
    run.clipping = 1;  // stored() reads the checkpoint in a run that updates at the boundary
    run.update = UpdateTime::at_the_boundary;
    EXPECT_EQ(stored(run, folder + "/step-00000002"), expected[2]);
  }
}

// The updates that hand over the tiles were issued, and wait for a slow disk.
TEST_F(OffloadSaving, WhatWaitsForASaveBetweenUpdatesAndTheirStepLosesNothing) {
  int point = 0;
  for (const int ranks : {1, 2}) {
    for (const std::int64_t persistent : {0, 600}) {  // persistent buffers are updated in step()
      for (const OffloadTier parameters : {OffloadTier::none, OffloadTier::nvme}) {
        if (!sampled(point++, 3)) continue;
        OddRun run = setup(ranks, 3, OffloadTier::nvme, parameters);
        run.clipping = 0;
        run.persistent = persistent;
        const std::vector<kernels::Digest> expected = undisturbed(run, 4);
        run.update = UpdateTime::as_reduced;
        const std::string folder =
            path(std::to_string(ranks) + std::to_string(persistent) + std::string(name_of(parameters)));
        FaultyFileSystem files(detail::posix_file_system());
        on_tiled_ranks(
            run,
            [&](Engine& engine, Runtime& runtime) {
              const auto slow = [&](int milliseconds) {
                (void)engine.state_digest();  // the step's own transfers are complete
                meet(runtime);
                if (runtime.rank() == 0) {
                  files.clear();
                  Fault delay = fault(FileOperation::read, 0, "nvme");
                  delay.delay = std::chrono::milliseconds(milliseconds);
                  if (milliseconds > 0) files.inject(delay);
                }
                meet(runtime);
              };
              for (int step = 0; step < 2; ++step) (void)one_step(engine, runtime);
              slow(20);
              engine.save(folder);
              whole_step(engine, runtime, engine.steps());
              EXPECT_EQ(engine.finish_saving(), folder + "/step-00000002");
              EXPECT_TRUE(engine.step().applied);
              slow(0);
              EXPECT_TRUE(one_step(engine, runtime).applied);
              EXPECT_EQ(engine.state_digest(), expected[4]);
              slow(20);
              engine.save(folder);
              whole_step(engine, runtime, engine.steps());  // and the engine is destroyed
            },
            &files);
        EXPECT_EQ(stored(run, folder + "/step-00000002"), expected[2]) << run.to_string();
        EXPECT_EQ(stored(run, folder + "/step-00000004"), expected[4]) << run.to_string();
        if (HasFailure()) return;
      }
    }
  }
}

// The first step reads ahead what its updates want first: nothing is read twice.
TEST_F(OffloadSaving, EarlyUpdatesFindTheOrderOfTheirFirstPassInTheModel) {
  OddRun run = setup(1, 3);
  run.clipping = 0;
  run.large = true;
  run.moments = DataType::block8;  // small tensors stay in fp32, in a buffer of their own
  run.update = UpdateTime::as_reduced;
  FaultyFileSystem files(detail::posix_file_system());
  const Config config = odd_config(run);
  RuntimeOptions options = RuntimeOptions::from(config);
  options.log_level = LogLevel::off;
  options.files = &files;
  Runtime runtime(options, make_self_communicator);
  Engine engine(runtime, odd_model(false, /*large=*/true), config);
  std::vector<std::int64_t> reads;  // one entry for each step; the first entry is without a step
  for (std::int64_t before = 0; reads.size() < 4; before = files.count(FileOperation::read)) {
    if (!reads.empty()) (void)one_step(engine, runtime);
    (void)engine.state_digest();  // reads the same amount each time, after the step's transfers
    reads.push_back(files.count(FileOperation::read) - before);
  }
  EXPECT_GT(reads[1], reads[0]);
  EXPECT_EQ(reads[1], reads[2]);
  EXPECT_EQ(reads[1], reads[3]);
}

TEST_F(OffloadSaving, AStepThatEndsEarlyUpdatesCompletesTheSaveFirst) {
  for (const int ranks : {1, 2}) {
    OddRun run = setup(ranks, 3);
    run.clipping = 0;
    const std::vector<kernels::Digest> expected = undisturbed(run, 1);
    run.update = UpdateTime::as_reduced;
    const std::string folder = path(std::to_string(ranks));
    on_tiled_ranks(run, [&](Engine& engine, Runtime& runtime) {
      (void)one_step(engine, runtime);
      engine.save(folder);
      EXPECT_THAT(message_of<NumericalError>([&] { (void)one_step(engine, runtime, "prime.c"); }),
                  HasSubstr("go on from a checkpoint"));
    });
    EXPECT_EQ(stored(run, folder), expected[1]) << ranks;
  }
}

TEST_F(OffloadSaving, NeitherSaveNorWhatWaitsForItBehindAStepTouchesTheNvmeTier) {
  for (const int ranks : {1, 2}) {
    const OddRun run = setup(ranks, 2);
    const std::string folder = path(std::to_string(ranks));
    FaultyFileSystem files(detail::posix_file_system());
    const std::vector<kernels::Digest> expected = undisturbed(run, 3);
    on_tiled_ranks(
        run,
        [&](Engine& engine, Runtime& runtime) {
          const auto allow = [&] {
            meet(runtime);
            if (runtime.rank() == 0) files.clear();
            meet(runtime);
          };
          const auto forbid = [&] {
            allow();
            (void)engine.state_digest();  // the step's own transfers are complete
            meet(runtime);
            if (runtime.rank() == 0) {
              files.inject(fault(FileOperation::read, EIO, "nvme"));
              files.inject(fault(FileOperation::write, EIO, "nvme"));
            }
            meet(runtime);
          };
          (void)one_step(engine, runtime);
          forbid();
          engine.save(folder);
          allow();
          (void)one_step(engine, runtime);
          forbid();
          EXPECT_EQ(engine.finish_saving(), folder + "/step-00000001");
          allow();
          (void)one_step(engine, runtime);
          EXPECT_EQ(engine.state_digest(), expected[3]);
        },
        &files);
    EXPECT_EQ(stored(run, folder), expected[1]);
  }
}

TEST_F(OffloadSaving, WithoutANextStepTilesAreReadForIt) {
  int point = 0;
  for (const int ranks : {1, 2}) {
    for (const bool inside_a_step : {false, true}) {
      if (!sampled(point++, 3)) continue;
      OddRun run = setup(ranks, 0);
      run.accumulation = 2;
      const std::string folder = path(std::to_string(ranks) + (inside_a_step ? "inside" : ""));
      const std::vector<kernels::Digest> expected = undisturbed(run, 4);
      on_tiled_ranks(run, [&](Engine& engine, Runtime& runtime) {
        (void)one_step(engine, runtime);
        engine.save(folder);
        if (!inside_a_step) {
          EXPECT_EQ(engine.finish_saving(), folder + "/step-00000001");
        }
        (void)one_step(engine, runtime);
        EXPECT_EQ(engine.save(folder, {.wait = true}), folder + "/step-00000002");
        (void)one_step(engine, runtime);
        engine.save(folder);
        if (inside_a_step) {
          // After the last micro-batch and before step(), while the disk already reads the step's tiles.
          whole_step(engine, runtime, engine.steps());
          EXPECT_EQ(engine.finish_saving(), folder + "/step-00000003");
          (void)engine.step();
        } else {
          engine.load(folder + "/step-00000002");
          EXPECT_EQ(engine.state_digest(), expected[2]);
          while (engine.steps() < 4) (void)one_step(engine, runtime);
        }
        EXPECT_EQ(engine.state_digest(), expected[4]);
        engine.save(folder);  // and the engine is destroyed
      });
      for (std::size_t step = 1; step <= 4; ++step) {
        EXPECT_EQ(stored(run, folder + "/step-0000000" + std::to_string(step)), expected[step])
            << step << " of " << run.to_string();
      }
    }
  }
}

TEST_F(OffloadSaving, OneIsUnderWayAtATime) {
  const OddRun run = setup(2, 3, OffloadTier::nvme, OffloadTier::nvme);
  const std::vector<kernels::Digest> expected = undisturbed(run, 3);
  on_tiled_ranks(run, [&](Engine& engine, Runtime& runtime) {
    engine.save(path("twice"));
    engine.save(path("again"));
    for (int step = 0; step < 3; ++step) {
      (void)one_step(engine, runtime);
      engine.save(path("run"));
    }
    EXPECT_EQ(engine.finish_saving(), path("run/step-00000003"));
  });
  EXPECT_EQ(stored(run, path("twice")), expected[0]);
  EXPECT_EQ(stored(run, path("again")), expected[0]);
  for (std::size_t step = 1; step <= 3; ++step) {
    EXPECT_EQ(stored(run, path("run/step-0000000" + std::to_string(step))), expected[step]);
  }
}

TEST_F(OffloadSaving, WhatIsWrittenMeanwhileIsNotInIt) {
  for (const double ratio : {1.0, 0.5}) {
    OddRun run = setup(2, 2);
    run.offload.ratio = ratio;
    const std::string folder = path(ratio == 1.0 ? "all" : "half");
    const std::vector<kernels::Digest> expected = undisturbed(run, 1);
    std::optional<kernels::Digest> after;
    on_tiled_ranks(run, [&](Engine& engine, Runtime& runtime) {
      (void)one_step(engine, runtime);
      engine.save(folder);
      // One rank keeps all small tensors, so the other still has tiles to hand over.
      engine.write_optimizer_state("tiny.e", "exp_avg", std::vector<float>(3, 7.0f));
      engine.write_weight("wider.j", std::vector<float>(2 * 4096 + 5, 0.5f));
      engine.write_weight("late.k", std::vector<float>(500, 0.25f));
      engine.write_weight(odd_frozen_tensor, std::vector<float>(131, 0.125f));
      EXPECT_EQ(engine.finish_saving(), folder + "/step-00000001");
      EXPECT_EQ(engine.read_weight("wider.j"), std::vector<float>(2 * 4096 + 5, 0.5f));
      EXPECT_NE(engine.state_digest(), expected[1]);
      engine.save(folder + "/changed");
      (void)one_step(engine, runtime);
      engine.save(folder + "/stepped");
      engine.load(folder + "/changed");
      const kernels::Digest digest = engine.state_digest();
      if (runtime.rank() == 0) after = digest;
      EXPECT_EQ(engine.read_optimizer_state("tiny.e", "exp_avg"), std::vector<float>(3, 7.0f));
    });
    EXPECT_EQ(stored(run, folder), expected[1]);
    EXPECT_EQ(stored(run, folder + "/changed"), *after);
  }
}

TEST_F(OffloadSaving, AFailedWriteIsToldOnceAndTrainingGoesOn) {
  const Fault faults[] = {
      fault(FileOperation::write, ENOSPC, "shard-00001-of-00002"),
      fault(FileOperation::write, EIO, "shard-00000-of-00002", 1, 1),
      fault(FileOperation::preallocate, ENOSPC, "shard-00001-of-00002"),
      fault(FileOperation::sync, EIO, "shard-00001-of-00002", 1, 1),
      fault(FileOperation::create_directory, EIO, ".tmp"),
  };
  const OddRun run = setup(2, 2);
  const std::vector<kernels::Digest> expected = undisturbed(run, 5);
  int number = 0;
  for (const bool stepping : {true, false}) {
    for (const Fault& one : faults) {
      const std::string folder = path(std::to_string(number));
      if (!sampled(number++, 3)) continue;
      FaultyFileSystem files(detail::posix_file_system());
      on_tiled_ranks(
          run,
          [&](Engine& engine, Runtime& runtime) {
            (void)one_step(engine, runtime);
            engine.save(folder, {.wait = true});
            (void)one_step(engine, runtime);
            if (runtime.rank() == 0) files.inject(one);
            meet(runtime);
            engine.save(folder);
            std::string told = test::nothing_thrown;
            if (!stepping) told = message_of<CheckpointError>([&] { engine.finish_saving(); });
            while (engine.steps() < 4) {
              const std::string message =
                  message_of<CheckpointError>([&] { whole_step(engine, runtime, engine.steps()); });
              if (message != test::nothing_thrown) {
                EXPECT_EQ(told, test::nothing_thrown) << "told twice";
                told = message;
                continue;
              }
              EXPECT_EQ(engine.step().saved, "");
            }
            if (told == test::nothing_thrown)
              told = message_of<CheckpointError>([&] { engine.finish_saving(); });
            EXPECT_THAT(told, AllOf(HasSubstr("cannot save step 2 to " + folder), HasSubstr("rank ")));
            EXPECT_EQ(engine.state_digest(), expected[4]);
            meet(runtime);
            if (runtime.rank() == 0) files.clear();
            meet(runtime);
            engine.save(folder);
            (void)one_step(engine, runtime);
            EXPECT_EQ(engine.state_digest(), expected[5]);
          },
          &files);
      std::vector<std::string> names;
      for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename());
      EXPECT_THAT(names,
                  ::testing::UnorderedElementsAre("step-00000001", "step-00000004", "latest", "run.lock"));
      EXPECT_EQ(stored(run, folder + "/step-00000001"), expected[1]);
      EXPECT_EQ(stored(run, folder + "/step-00000004"), expected[4]);
    }
  }
}

TEST_F(OffloadSaving, AnEngineThatEndsByAnErrorWaitsForNoTiles) {
  for (const int ranks : {1, 2}) {
    for (const bool stepped : {false, true}) {
      const OddRun run = setup(ranks, 2);
      const std::string folder = path(std::to_string(ranks) + (stepped ? "stepped" : ""));
      EXPECT_THROW(on_tiled_ranks(run,
                                  [&](Engine& engine, Runtime& runtime) {
                                    engine.save(folder, {.wait = true});
                                    (void)one_step(engine, runtime);
                                    engine.save(folder);
                                    if (stepped) (void)one_step(engine, runtime);
                                    throw InvalidArgument("the program's own");
                                  }),
                   InvalidArgument);
      const std::vector<kernels::Digest> expected = undisturbed(run, 1);
      // A single rank completes its save.
      EXPECT_EQ(stored(run, folder), expected[ranks == 1 ? 1 : 0]);
    }
  }
}

TEST_F(OffloadSaving, ADiskThatFailsUnderTheTilesEndsTheRunAndLeavesTheLastCheckpoint) {
  int point = 0;
  for (const int ranks : {1, 2}) {
    for (const bool stepping : {true, false}) {
      for (const int nth : {1, 4}) {
        if (!sampled(point++, 3)) continue;
        const OddRun run = setup(ranks, 2);
        const std::string folder =
            path(std::to_string(ranks) + (stepping ? "stepping" : "") + std::to_string(nth));
        FaultyFileSystem files(detail::posix_file_system());
        on_tiled_ranks(
            run,
            [&](Engine& engine, Runtime& runtime) {
              engine.save(folder, {.wait = true});
              (void)one_step(engine, runtime);
              (void)engine.state_digest();
              engine.save(folder);
              meet(runtime);
              if (runtime.rank() == 0) files.inject(fault(FileOperation::read, EIO, "nvme", nth));
              std::string told = test::nothing_thrown;
              try {
                meet(runtime);  // ends with the failure of a rank that is past this point
                for (int step = 0; stepping && step < 3; ++step) (void)one_step(engine, runtime);
                (void)engine.finish_saving();
              } catch (const Error& error) {
                told = error.message();
              }
              EXPECT_THAT(told, ::testing::AnyOf(HasSubstr("Input/output error"), HasSubstr("rank")));
            },
            &files);
        EXPECT_EQ(stored(run, folder), undisturbed(run, 0)[0]);
      }
    }
  }
}

TEST_F(OffloadSaving, TheSnapshotHoldsWhatLivesInMemoryAndThePlanSaysSo) {
  const auto host = [](const Runtime& runtime) { return runtime.ledger().account(Tier::host); };
  for (const double ratio : {1.0, 0.5}) {
    OddRun run = setup(2, 2);
    run.offload.ratio = ratio;
    std::vector<std::int64_t> bytes(2);
    on_tiled_ranks(
        run,
        [&](Engine& engine, Runtime& runtime) {
          const std::int64_t before = host(runtime).current.total();
          for (int save = 0; save < 3; ++save) {
            engine.save(path(std::to_string(ratio)));
            if (save > 0) (void)one_step(engine, runtime);
            (void)engine.finish_saving();
            EXPECT_EQ(host(runtime).current.total(), before);
          }
          // Blocks come from the snapshot; rank 1, which does not commit anything, has no memory.
          if (runtime.rank() == 1) {
            EXPECT_EQ(host(runtime).peak, before);
          }
          bytes[static_cast<std::size_t>(runtime.rank())] = before;
        },
        nullptr, true);
    EXPECT_EQ(bytes[0], bytes[1]);
    Config config = odd_config(run);
    config.save_buffer = true;
    RuntimeOptions options = RuntimeOptions::from(config);
    options.device = DeviceKind::meta;
    Runtime runtime(options, [&](const CommunicatorOptions& o) {
      return make_meta_communicator(0, run.ranks, run.ranks, o);
    });
    Engine engine(runtime, tiled_model(), config);
    EXPECT_EQ(host(runtime).current.total(), bytes[0]);
    engine.save(path("nowhere"));
    EXPECT_EQ(host(runtime).current.total(), bytes[0]);
    EXPECT_FALSE(engine.saving());
  }
}

TEST_F(OffloadSaving, AnyTierGoesOnFromAnyOther) {
  struct Home {
    int ranks, stage;
    OffloadTier optimizer, parameters;
  };
  const OffloadTier none = OffloadTier::none, cpu = OffloadTier::cpu, nvme = OffloadTier::nvme;
  const Home homes[] = {{2, 0, none, none}, {2, 0, cpu, none}, {2, 0, nvme, none},
                        {2, 3, none, none}, {2, 3, cpu, cpu},  {2, 3, nvme, nvme},
                        {1, 0, nvme, none}, {1, 3, cpu, nvme}, {1, 0, none, none}};
  int number = 0, pair = 0;
  for (const Home& from : homes) {
    const OddRun saver = setup(from.ranks, from.stage, from.optimizer, from.parameters);
    const std::string folder = path(std::to_string(number++));
    kernels::Digest digest;
    std::vector<double> losses;
    on_tiled_ranks(saver, [&](Engine& engine, Runtime& runtime) {
      (void)one_step(engine, runtime);
      (void)one_step(engine, runtime);
      const kernels::Digest mine = engine.state_digest();
      engine.save(folder);
      std::vector<double> seen;
      for (int step = 0; step < 3; ++step) seen.push_back(one_step(engine, runtime).loss);
      if (runtime.rank() == 0) {
        digest = mine;
        losses = seen;
      }
    });
    for (const Home& to : homes) {
      if (!swept(pair++, 8)) continue;
      const OddRun loader = setup(to.ranks, to.stage, to.optimizer, to.parameters);
      const std::string what = saver.to_string() + " -> " + loader.to_string();
      on_tiled_ranks(loader, [&](Engine& engine, Runtime& runtime) {
        EXPECT_EQ(engine.load(folder).step, 2) << what;
        EXPECT_EQ(engine.state_digest(), digest) << what;
        for (int step = 0; from.ranks == to.ranks && step < 3; ++step) {
          EXPECT_EQ(one_step(engine, runtime).loss, losses[static_cast<std::size_t>(step)]) << what;
        }
      });
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace tranche::test
