// Saves that continue during the next steps: they overlap with training, contain the state of their
// beginning, and report failures without changing training.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "../offload/faulty_file_system.h"
#include "on_ranks.h"
#include "saving_fixture.h"

namespace tranche::test {
namespace {

using detail::FileSystem;
using detail::OpenMode;
using detail::posix_file_system;
using ::testing::AllOf;
using ::testing::HasSubstr;
using tranche::testing::Fault;
using tranche::testing::FaultyFileSystem;
using tranche::testing::FileOperation;
namespace fs = std::filesystem;

/// Blocks every attempt to open a shard for writing until the gate opens.
class GatedFileSystem : public FileSystem {
 public:
  explicit GatedFileSystem(FileSystem& upstream) : upstream_(upstream) {}
  void open_gate() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    opened_.notify_all();
  }
  std::unique_ptr<detail::File> open(const std::string& path, OpenMode mode,
                                     detail::Caching caching) override {
    if (mode == OpenMode::create_or_truncate && path.find("shard-") != std::string::npos) {
      std::unique_lock lock(mutex_);
      opened_.wait(lock, [this] { return open_; });
    }
    return upstream_.open(path, mode, caching);
  }
  void rename(const std::string& from, const std::string& to) override { upstream_.rename(from, to); }
  void remove(const std::string& path) override { upstream_.remove(path); }
  bool create_directory(const std::string& path) override { return upstream_.create_directory(path); }
  std::vector<detail::DirectoryEntry> list(const std::string& path) override { return upstream_.list(path); }
  std::optional<detail::FileStatus> status(const std::string& path) override {
    return upstream_.status(path);
  }
  detail::SpaceInfo space(const std::string& path) override { return upstream_.space(path); }
  void sync_directory(const std::string& path) override { upstream_.sync_directory(path); }

 private:
  FileSystem& upstream_;
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
};

OddRun setup(int ranks, int stage) {
  OddRun run;
  run.ranks = ranks;
  run.stage = stage;
  return run;
}

class BackgroundSaving : public Saving {
 protected:
  std::string step_path(int step) const { return path("step-0000000" + std::to_string(step)); }
  /// The state digest after `steps` steps of a run that never saves.
  static kernels::Digest undisturbed(const OddRun& run, int steps) {
    kernels::Digest digest;
    std::mutex mutex;
    on_ranks(run, [&](Engine& engine, Runtime& runtime) {
      for (int step = 0; step < steps; ++step) {
        whole_step(engine, runtime, step);
        (void)engine.step();
      }
      const kernels::Digest mine = engine.state_digest();
      const std::lock_guard lock(mutex);
      digest = mine;
    });
    return digest;
  }
  kernels::Digest stored(const OddRun& run, const std::string& from) const {
    kernels::Digest digest;
    std::mutex mutex;
    on_ranks(run, [&](Engine& engine, Runtime&) {
      engine.load(from);
      const kernels::Digest mine = engine.state_digest();
      const std::lock_guard lock(mutex);
      digest = mine;
    });
    return digest;
  }
};

TEST_F(BackgroundSaving, StepsGoOnMeanwhileAndTheCheckpointHoldsWhatWasThen) {
  for (const int stage : {0, 3}) {
    const OddRun run = setup(3, stage);
    GatedFileSystem gated(posix_file_system());
    const std::string folder = path("stage" + std::to_string(stage));
    const std::string wanted = folder + "/step-00000001";
    on_ranks(
        run,
        [&](Engine& engine, Runtime& runtime) {
          whole_step(engine, runtime, 0);
          (void)engine.step();
          EXPECT_EQ(engine.save(folder), wanted);
          int step = 1;
          // No shard can be opened yet, so these steps run while the save is in progress.
          for (; step < 4; ++step) {
            whole_step(engine, runtime, step);
            EXPECT_EQ(engine.step().saved, "");
            EXPECT_TRUE(engine.saving());
          }
          EXPECT_FALSE(fs::exists(wanted));
          if (runtime.rank() == 0) gated.open_gate();
          std::string saved;
          for (; saved.empty() && step < 100000; ++step) {
            whole_step(engine, runtime, step);
            saved = engine.step().saved;
          }
          EXPECT_EQ(saved, wanted);  // in the same step on every rank, otherwise they would hang
          EXPECT_FALSE(engine.saving());
          EXPECT_EQ(engine.finish_saving(), "");
        },
        [&](Config&, RuntimeOptions& options) { options.files = &gated; });
    EXPECT_EQ(stored(run, wanted), undisturbed(run, 1)) << "stage " << stage;
  }
}

TEST_F(BackgroundSaving, OneIsUnderWayAtATime) {
  const OddRun run = setup(2, 2);
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    for (int step = 0; step < 3; ++step) {
      whole_step(engine, runtime, step);
      (void)engine.step();
      engine.save(path());
    }
    EXPECT_EQ(engine.finish_saving(), step_path(3));
    EXPECT_FALSE(engine.saving());
  });
  for (const int step : {1, 2, 3}) EXPECT_EQ(stored(run, step_path(step)), undisturbed(run, step)) << step;
}

TEST_F(BackgroundSaving, TheEngineEndsOnlyWhenItIsDone) {
  const OddRun run = setup(2, 1);
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    whole_step(engine, runtime, 0);
    (void)engine.step();
    engine.save(path());
  });
  EXPECT_EQ(stored(run, path()), undisturbed(run, 1));
}

TEST_F(BackgroundSaving, AFailedWriteIsToldAtTheNextStepAndTrainingGoesOn) {
  struct Case {
    FileOperation operation;
    int times;
    int code;
    const char* where;
    const char* told;
  };
  // Payload, sync and space on the ranks, and rank 0's steps from files to a checkpoint.
  const Case cases[] = {
      {FileOperation::write, -1, ENOSPC, "shard-00001-of-00003", "No space left on device"},
      {FileOperation::sync, 1, EIO, "shard-00002-of-00003", "Input/output error"},
      {FileOperation::preallocate, 1, ENOSPC, "shard-00000-of-00003", "No space left on device"},
      {FileOperation::write, 1, ENOSPC, "manifest", "No space left on device"},
      {FileOperation::rename, 1, EIO, "step-00000002", "Input/output error"},
  };
  const OddRun run = setup(3, 3);
  const kernels::Digest wanted = undisturbed(run, 4);
  int number = 0;
  for (const Case& one : cases) {
    const std::string folder = path(std::to_string(number++));
    const std::string what = one.where;
    Fault fault;
    fault.operation = one.operation;
    fault.times = one.times;
    fault.code = one.code;
    fault.path_contains = one.where;
    FaultyFileSystem files(posix_file_system());
    on_ranks(
        run,
        [&](Engine& engine, Runtime& runtime) {
          whole_step(engine, runtime, 0);
          (void)engine.step();
          engine.save(folder, {.wait = true});
          whole_step(engine, runtime, 1);
          (void)engine.step();
          if (runtime.rank() == 0) files.inject(fault);
          runtime.all().barrier({"test", "faults", Traffic::control}).wait();
          engine.save(folder);
          int step = 2;
          std::string told = test::nothing_thrown;
          while (step < 4) {
            const std::string message =
                message_of<CheckpointError>([&] { whole_step(engine, runtime, step); });
            if (message != test::nothing_thrown) {
              EXPECT_EQ(told, test::nothing_thrown) << "told twice";
              told = message;
              EXPECT_FALSE(engine.saving());
              continue;  // the same step again; the save has not begun
            }
            EXPECT_EQ(engine.step().saved, "") << what;
            ++step;
          }
          if (told == test::nothing_thrown)
            told = message_of<CheckpointError>([&] { engine.finish_saving(); });
          EXPECT_THAT(told, AllOf(HasSubstr("cannot save step 2 to " + folder), HasSubstr(one.told))) << what;
          EXPECT_EQ(engine.state_digest(), wanted) << what;
          if (runtime.rank() == 0) files.clear();
          runtime.all().barrier({"test", "faults", Traffic::control}).wait();
          engine.save(folder, {.wait = true});
        },
        [&](Config&, RuntimeOptions& options) { options.files = &files; });
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename());
    EXPECT_THAT(names,
                ::testing::UnorderedElementsAre("step-00000001", "step-00000004", "latest", "run.lock"))
        << what;
    EXPECT_EQ(stored(run, folder + "/step-00000001"), undisturbed(run, 1)) << what;
    EXPECT_EQ(stored(run, folder + "/step-00000004"), wanted) << what;
  }
}

/// A rank that receives the failure may end the job at once, so the folder must have been removed before,
/// although removal is slow here.
TEST_F(BackgroundSaving, NobodyHearsOfAFailureBeforeItsFolderIsGone) {
  const std::string folder = path("cleared");
  FaultyFileSystem files(posix_file_system());
  on_ranks(
      setup(3, 1),
      [&](Engine& engine, Runtime& runtime) {
        if (runtime.rank() == 0) {
          files.inject({.operation = FileOperation::sync, .code = EIO, .path_contains = "shard-00000"});
          files.inject({.operation = FileOperation::remove, .delay = std::chrono::milliseconds(200)});
        }
        runtime.all().barrier({"test", "faults", Traffic::control}).wait();
        EXPECT_THAT(message_of<CheckpointError>([&] { engine.save(folder, {.wait = true}); }),
                    AllOf(HasSubstr("rank 0: "), HasSubstr("Input/output error")));
        for (const auto& entry : fs::directory_iterator(folder)) {
          EXPECT_EQ(entry.path().filename(), "run.lock") << "as rank " << runtime.rank() << " finds it";
        }
      },
      [&](Config&, RuntimeOptions& options) { options.files = &files; });
}

TEST_F(BackgroundSaving, WhatFailsOnceTheCheckpointIsThereIsNotToldAsItsFailure) {
  for (const auto& [operation, where] :
       {std::pair(FileOperation::rename, "latest"), std::pair(FileOperation::remove, "step-00000000")}) {
    const std::string folder = path(operation == FileOperation::rename ? "renamed" : "removed");
    FaultyFileSystem files(posix_file_system());
    on_ranks(
        setup(2, 2),
        [&](Engine& engine, Runtime& runtime) {
          engine.save(folder, {.wait = true});
          whole_step(engine, runtime, 0);
          (void)engine.step();
          if (runtime.rank() == 0) {
            Fault fault;
            fault.operation = operation;
            fault.times = -1;
            fault.code = EIO;
            fault.path_contains = where;
            files.inject(fault);
          }
          runtime.all().barrier({"test", "faults", Traffic::control}).wait();
          engine.save(folder, {.keep_last = 1});
          EXPECT_EQ(engine.finish_saving(), folder + "/step-00000001");
        },
        [&](Config&, RuntimeOptions& options) { options.files = &files; });
    EXPECT_EQ(stored(setup(2, 2), folder), undisturbed(setup(2, 2), 1)) << where;
  }
}

TEST_F(BackgroundSaving, AnEngineThatEndsInsideAMicroBatchFinishesTheSaveWhenAlone) {
  const OddRun run = setup(1, 0);
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    whole_step(engine, runtime, 0);
    (void)engine.step();
    engine.save(path());
    engine.begin_micro_batch();
  });
  EXPECT_EQ(stored(run, path()), undisturbed(run, 1));
}

TEST_F(BackgroundSaving, AFailureIsAlsoToldByTheCallsThatMustNotOverlookIt) {
  FaultyFileSystem files(posix_file_system());
  files.inject({FileOperation::sync, 1, -1, EIO, 0, {}, "shard-00001"});
  on_ranks(
      setup(2, 0),
      [&](Engine& engine, Runtime&) {
        const auto failure = AllOf(HasSubstr("cannot save step 0"), HasSubstr("rank 1"));
        engine.save(path());
        EXPECT_THAT(message_of<CheckpointError>([&] { engine.finish_saving(); }), failure);
        EXPECT_EQ(engine.finish_saving(), "");
        engine.save(path());
        EXPECT_THAT(message_of<CheckpointError>([&] { engine.save(path()); }), failure);
        engine.save(path());
        EXPECT_THAT(message_of<CheckpointError>([&] { engine.load(path()); }), failure);
        EXPECT_THAT(message_of<CheckpointError>([&] { engine.save(path(), {.wait = true}); }), failure);
      },
      [&](Config&, RuntimeOptions& options) { options.files = &files; });
}

TEST_F(BackgroundSaving, TheSnapshotIsInTheBooksAndReused) {
  const OddRun run = setup(2, 3);
  const auto host_bytes = [](const Runtime& runtime) {
    return runtime.ledger().account(Tier::host).current.total();
  };
  std::int64_t reserved = 0;
  std::mutex mutex;
  on_ranks(
      run,
      [&](Engine& engine, Runtime& runtime) {
        const std::int64_t before = host_bytes(runtime);
        EXPECT_GT(before, 0);
        for (int save = 0; save < 3; ++save) {
          engine.save(path(), {.wait = true});
          EXPECT_EQ(host_bytes(runtime), before);
        }
        const std::lock_guard lock(mutex);
        reserved = before;
      },
      [&](Config& config, RuntimeOptions&) { config.save_buffer = true; });
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    EXPECT_EQ(host_bytes(runtime), 0);
    for (int save = 0; save < 2; ++save) {
      engine.save(path("again"), {.wait = true});
      EXPECT_EQ(host_bytes(runtime), reserved);
    }
  });
  // The plan has the same memory.
  Config config = odd_config(run);
  config.save_buffer = true;
  RuntimeOptions options = RuntimeOptions::from(config);
  options.device = DeviceKind::meta;
  Runtime runtime(options, [&](const CommunicatorOptions& o) {
    return make_meta_communicator(0, run.ranks, run.ranks, o);
  });
  Engine engine(runtime, odd_model(), config);
  EXPECT_EQ(host_bytes(runtime), reserved);
  engine.save(path("nowhere"));
  EXPECT_EQ(host_bytes(runtime), reserved);
  EXPECT_FALSE(engine.saving());
  EXPECT_FALSE(fs::exists(path("nowhere")));
}

TEST_F(BackgroundSaving, SamplesAreCountedAndGoOn) {
  OddRun run = setup(2, 2);
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    const std::int64_t batch = engine.config().train_batch_size;
    EXPECT_EQ(batch, 6);
    for (int step = 0; step < 2; ++step) {
      whole_step(engine, runtime, step,
                 step == 0 ? "prime.c" : "");  // a skipped step uses its samples as well
      (void)engine.step();
    }
    EXPECT_EQ(engine.samples(), 2 * batch);
    engine.save(path());
  });
  run.ranks = 3;  // gives another batch
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    EXPECT_EQ(engine.load(path()).samples, 12);
    EXPECT_EQ(engine.samples(), 12);
    whole_step(engine, runtime, 2);
    (void)engine.step();
    EXPECT_EQ(engine.samples(), 12 + 9);
  });
}

TEST(Stopping, AllRanksLearnInTheSameStepThatOneWasAskedTo) {
  const OddRun run = setup(3, 1);
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    for (int step = 0; step < 4; ++step) {
      whole_step(engine, runtime, step);
      if (step == 2 && runtime.rank() == 1) engine.request_stop();
      const StepResult result = engine.step();
      EXPECT_TRUE(result.applied);
      EXPECT_EQ(result.stop_requested, step >= 2) << "step " << step << " rank " << runtime.rank();
    }
  });
}

}  // namespace
}  // namespace tranche::test
