// Loss of power at any moment of a save, and failures of any of its operations.

#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <thread>

#include "../offload/faulty_file_system.h"
#include "../offload/recording_file_system.h"
#include "../offload/test_folder.h"
#include "checkpoint/reader.h"
#include "sample.h"
#include "tests/core/rounds.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {
namespace {

using detail::join_path;
using detail::OpenMode;
using namespace tranche::testing;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;

/// A small layout, so that hundreds of saves take seconds. Each of two ranks holds alternate elements.
Layout small_layout(int world) {
  Layout layout = make_layout({{"u", 1, {{"w", Shape{401}, false, {}}, {"f", Shape{3}, true, {}}}}},
                              {{"m", DataType::bfloat16}}, DataType::float32, DataType::bfloat16, world);
  if (world != 2) return layout;
  layout.mesh = {{"tensor", 2}};
  layout.units[0].buffers[0] = {
      "split",
      false,
      {},
      {{{{0, {{0, 2, 201, 1}}, 0}}, {{0, 0, 201, 0}}}, {{{0, {{1, 2, 200, 1}}, 0}}, {{1, 0, 200, 0}}}}};
  layout.units[0].buffers[1].group = {"tensor"};
  layout.place();
  return layout;
}

class CrashTest : public ::testing::Test {
 protected:
  detail::FileSystem& files = detail::posix_file_system();
  TestFolder folder{fast_folder()};
  TestStorage storage{files};
  const std::string run = folder / "run";

  /// Finds the newest checkpoint of a folder and verifies every byte of it.
  std::string newest(const std::string& parent) {
    std::vector<std::string> notes;
    const Listed listed = newest_checkpoint(files, parent, notes);
    for (const Damage& damage : Reader(storage, listed.path).verify()) ADD_FAILURE() << describe(damage);
    return listed.path.substr(listed.path.rfind('/') + 1);
  }
  std::vector<std::string> names() { return names_in(run); }
  std::vector<std::string> names_in(const std::string& parent) {
    std::vector<std::string> names;
    for (const auto& entry : files.list(parent)) {
      if (entry.name != lease_name) names.push_back(entry.name);
    }
    return names;
  }

  /// Simulates a power failure after every prefix of a recording in every way, with `draws` draws of the
  /// random ways, and calls check(prefix, folder, first); `first` is true for the first draw. Under a
  /// sanitizer each prefix has a third of the ways, different from the third of the previous prefix. A part
  /// of the tests runs the way that keeps everything and its part of the others.
  template <typename Check>
  void crash_everywhere(const RecordingFileSystem& recording, std::uint64_t draws, const Check& check) {
    for (std::size_t prefix = 0; prefix <= recording.operations(); ++prefix) {
      for (const Crash crash : all_crashes) {
        const std::uint64_t seeds = crash == Crash::torn || crash == Crash::reordered ? draws : 1;
        for (std::uint64_t seed = 0; seed < seeds; ++seed) {
          const bool chosen = test::swept(static_cast<int>(prefix + seed) + static_cast<int>(crash), 3);
          if (!chosen && crash != Crash::kept) continue;
          const std::string left = folder / "left";
          std::filesystem::remove_all(left);
          recording.replay(prefix, {crash, seed + 100 * prefix, 512}, left);
          SCOPED_TRACE("crash " + std::to_string(static_cast<int>(crash)) + ", seed " +
                       std::to_string(seed + 100 * prefix) + ", after " +
                       (prefix > 0 ? recording.describe(prefix - 1) : "nothing"));
          check(prefix, left, seed == 0);
          if (HasFailure()) return;
        }
      }
    }
  }

  /// The steps of the checkpoints of a folder after a crash, newest first. Expects that every folder that
  /// looks like a checkpoint is a complete one, and that `latest`, if it exists, names one of them.
  std::vector<std::int64_t> sound_steps(const std::string& parent) {
    std::vector<std::int64_t> steps;
    for (const Listed& listed : list_checkpoints(files, parent)) {
      EXPECT_EQ(listed.problem, "");
      if (!listed.complete()) continue;
      for (const Damage& damage : Reader(storage, listed.path).verify()) ADD_FAILURE() << describe(damage);
      steps.push_back(listed.step);
    }
    const std::string latest = join_path(parent, std::string(latest_name));
    if (files.exists(latest)) {
      const std::string name = parse_latest(files.read_file(latest));
      EXPECT_THAT(steps, Contains(parse_step_name(name))) << "latest names '" << name << "'";
    }
    return steps;
  }

  /// Saves after a crash, and expects that the save removes what the crashed process left.
  void save_again(const std::string& parent, std::int64_t step) {
    RunFolder next(storage, parent, 9);
    save_sample(storage, next, small_layout(1), step);
    EXPECT_THAT(names_in(parent), Each(AnyOf("latest", MatchesRegex("step-[0-9]{8}"))));
    EXPECT_EQ(sound_steps(parent).at(0), step);
  }
};

TEST_F(CrashTest, AnyPrefixOfASaveLeavesACompleteCheckpoint) {
  save_sample(storage, run, small_layout(2), 1);
  RecordingFileSystem recording(files, run);
  const TestStorage recorded(recording);
  RunFolder saves(recorded, run, 7);
  save_sample(recorded, saves, small_layout(2), 2, Way::image, 1);
  recording.mark("done");
  const std::size_t done = recording.find_mark("done");
  ASSERT_GT(done, 25u);
  int replays = 0;
  for (std::size_t prefix = 0; prefix <= done + 1; ++prefix) {
    for (const Crash crash : all_crashes) {
      const std::uint64_t seeds = crash == Crash::torn || crash == Crash::reordered ? 5 : 1;
      for (std::uint64_t seed = 0; seed < seeds; ++seed) {
        const std::string left = folder / "left";
        std::filesystem::remove_all(left);
        recording.replay(prefix, {crash, seed + 100 * prefix, 512}, left);
        const std::string name = newest(left);
        ++replays;
        if (prefix > done) {
          ASSERT_EQ(name, "step-00000002") << "the save had reported done";
        } else {
          ASSERT_THAT(name, AnyOf("step-00000001", "step-00000002"))
              << "after " << (prefix > 0 ? recording.describe(prefix - 1) : "nothing");
        }
      }
    }
  }
  EXPECT_GT(replays, 300);
}

/// A run from its first save into a folder that does not exist yet, with retention after each save. A
/// checkpoint that was reported complete stays, as do milestones, and a removed one never looks like a
/// checkpoint again.
TEST_F(CrashTest, SavesInARowWithRetentionNeverLoseWhatIsKept) {
  const std::string root = folder / "out";
  const std::string parent = "a/run";
  std::filesystem::create_directories(root);
  RecordingFileSystem recording(files, root);
  const TestStorage recorded(recording);
  RunFolder saves(recorded, join_path(root, parent), 7);
  constexpr std::int64_t last = 4;
  std::vector<std::size_t> done;  // by step
  for (std::int64_t step = 1; step <= last; ++step) {
    save_sample(recorded, saves, small_layout(static_cast<int>(1 + step % 2)), step);
    recording.mark("done " + std::to_string(step));
    done.push_back(recording.find_mark("done " + std::to_string(step)));
    saves.retain({1, 2});
  }
  EXPECT_THAT(names_in(join_path(root, parent)), ElementsAre("latest", "step-00000002", "step-00000004"));
  int replays = 0;
  crash_everywhere(recording, 2, [&](std::size_t prefix, const std::string& left, bool first) {
    ++replays;
    const auto reported = std::count_if(done.begin(), done.end(), [&](auto mark) { return prefix > mark; });
    const std::vector<std::int64_t> steps = sound_steps(join_path(left, parent));
    if (reported > 0) {
      ASSERT_FALSE(steps.empty());
      ASSERT_THAT(steps[0], AnyOf(reported, reported + 1));
      for (std::int64_t kept = 2; kept <= reported; kept += 2) ASSERT_THAT(steps, Contains(kept));
    } else {
      ASSERT_THAT(steps, AnyOf(IsEmpty(), ElementsAre(1)));
    }
    if (first) save_again(join_path(left, parent), 9);
  });
  EXPECT_GT(replays, 600 / (test::sanitized ? 3 : test::sweep_part().of));
}

std::string with_loss(double loss) {
  return R"({"held_out": {"a/b": {"loss": )" + std::to_string(loss) + "}}}";
}
constexpr const char* loss_pointer = "/held_out/a~1b/loss";

/// The checkpoint with the lowest loss exists at every moment, from its report until a lower one is reported.
TEST_F(CrashTest, SavesInARowNeverLoseTheLowest) {
  const std::string root = folder / "out";
  std::filesystem::create_directories(root);
  RecordingFileSystem recording(files, root);
  const TestStorage recorded(recording);
  RunFolder saves(recorded, join_path(root, "run"), 7);
  const std::vector<double> losses{3, 2, 2.5, 1, 4};
  std::vector<std::size_t> done;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    save_sample(recorded, saves, small_layout(1), static_cast<std::int64_t>(i) + 1, Way::image, 0,
                with_loss(losses[i]));
    const std::string mark = "done " + std::to_string(i + 1);
    recording.mark(mark);
    done.push_back(recording.find_mark(mark));
    saves.retain({1, 0, loss_pointer});
  }
  EXPECT_THAT(names_in(join_path(root, "run")), ElementsAre("latest", "step-00000004", "step-00000005"));
  crash_everywhere(recording, 1, [&](std::size_t prefix, const std::string& left, bool) {
    const auto reported = std::count_if(done.begin(), done.end(), [&](auto mark) { return prefix > mark; });
    if (reported == 0) return;
    const std::vector<Listed> found = list_checkpoints(files, join_path(left, "run"));
    const double least = *std::min_element(losses.begin(), losses.begin() + reported);
    const Listed* best = lowest(found, loss_pointer);
    ASSERT_NE(best, nullptr);
    ASSERT_LE(number_of(*best->manifest, loss_pointer), least);
    for (const Damage& damage : Reader(storage, best->path).verify()) ADD_FAILURE() << describe(damage);
  });
}

/// Ranks write at the same time, two of them before rank 0 has prepared anything, and end in a different
/// order.
TEST_F(CrashTest, ThreeRanksWhoseWritesInterleave) {
  save_sample(storage, run, small_layout(2), 1);
  RecordingFileSystem recording(files, run);
  const TestStorage recorded(recording);
  RunFolder saves(recorded, run, 7);
  const Layout layout = small_layout(3);
  Manifest manifest;
  manifest.layout = layout;
  manifest.run = sample_run(2);
  std::vector<std::unique_ptr<ShardPlan>> plans;
  std::vector<std::unique_ptr<ShardWriter>> writers(3);
  for (int rank = 0; rank < 3; ++rank) plans.push_back(std::make_unique<ShardPlan>(layout, rank, 2));
  const auto begin = [&](std::size_t rank) {
    writers[rank] = std::make_unique<ShardWriter>(recorded, *plans[rank], saves.temporary(2));
  };
  const auto put = [&](std::size_t rank, std::size_t piece) {
    const auto pieces = plans[rank]->pieces();
    if (piece >= pieces.size()) return;
    const SectionPiece& one = pieces[piece];
    writers[rank]->put(one, sample_piece(layout, one, 1).data());
  };
  begin(2);
  put(2, 0);
  begin(1);
  saves.prepare(2, plans[0]->file_bytes() * 3);
  begin(0);
  for (std::size_t piece = 0; piece < plans[0]->pieces().size(); ++piece) {
    for (const std::size_t rank : {1, 0, 2}) {
      if (rank != 2 || piece > 0) put(rank, piece);
    }
  }
  manifest.shards.resize(3);
  for (const std::size_t rank : {2, 0, 1}) manifest.shards[rank] = writers[rank]->finish();
  saves.commit(manifest, make_master_image(manifest.layout));
  recording.mark("done");
  const std::size_t done = recording.find_mark("done");
  crash_everywhere(recording, 4, [&](std::size_t prefix, const std::string& left, bool first) {
    const std::vector<std::int64_t> steps = sound_steps(left);
    if (prefix > done) {
      ASSERT_THAT(steps, ElementsAre(2, 1));
    } else {
      ASSERT_THAT(steps, AnyOf(ElementsAre(1), ElementsAre(2, 1)));
    }
    if (first) save_again(left, 9);
  });
}

TEST_F(CrashTest, ThreeRanksThatWriteAtTheSameMoment) {
  save_sample(storage, run, small_layout(2), 1);
  RecordingFileSystem recording(files, run);
  const TestStorage recorded(recording);
  RunFolder saves(recorded, run, 7);
  Manifest manifest;
  manifest.layout = small_layout(3);
  manifest.run = sample_run(2);
  manifest.shards.resize(3);
  std::vector<std::unique_ptr<ShardPlan>> plans;
  for (int rank = 0; rank < 3; ++rank) plans.push_back(std::make_unique<ShardPlan>(manifest.layout, rank, 2));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      const TestStorage own(recording);
      const ShardPlan& plan = *plans[static_cast<std::size_t>(rank)];
      if (rank == 0) RunFolder(own, run, 7).prepare(2, plan.file_bytes() * 3);
      manifest.shards[static_cast<std::size_t>(rank)] =
          write_sample_shard(own, plan, saves.temporary(2), rank == 1 ? Way::pieces : Way::image, 1);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  saves.commit(manifest, make_master_image(manifest.layout));
  recording.mark("done");
  const std::size_t done = recording.find_mark("done");
  crash_everywhere(recording, 2, [&](std::size_t prefix, const std::string& left, bool) {
    const std::vector<std::int64_t> steps = sound_steps(left);
    if (prefix > done) {
      ASSERT_THAT(steps, ElementsAre(2, 1));
    } else {
      ASSERT_THAT(steps, AnyOf(ElementsAre(1), ElementsAre(2, 1)));
    }
  });
}

/// A save replaces a checkpoint of the same step. At every moment one of the two exists, and after the report
/// it is the new one.
TEST_F(CrashTest, ReplacingTheSameStepNeverLosesBoth) {
  save_sample(storage, run, small_layout(2), 1);
  RecordingFileSystem recording(files, run);
  const TestStorage recorded(recording);
  RunFolder saves(recorded, run, 7, {0x1234});  // continues from that checkpoint
  save_sample(recorded, saves, small_layout(3), 1, Way::image, 1);
  recording.mark("done");
  EXPECT_THAT(names(), ElementsAre("latest", "step-00000001"));
  EXPECT_EQ(open_manifest(files, run + "/step-00000001").layout.world, 3);
  const std::size_t done = recording.find_mark("done");
  bool old_name = false;
  crash_everywhere(recording, 4, [&](std::size_t prefix, const std::string& left, bool first) {
    ASSERT_THAT(sound_steps(left), ElementsAre(1));
    const std::string name = newest(left);
    ASSERT_THAT(name, AnyOf("step-00000001", "step-00000001.old"));
    if (prefix > done) {
      ASSERT_EQ(name, "step-00000001");
      ASSERT_EQ(open_manifest(files, join_path(left, name)).layout.world, 3);
    }
    if (first) {  // the next save gives an old checkpoint its name back
      save_again(left, 2);
      ASSERT_TRUE(files.exists(left + "/step-00000001"));
    }
    old_name = old_name || name == "step-00000001.old";
  });
  EXPECT_TRUE(old_name);
}

TEST_F(CrashTest, AFullDiskAtAnyOperationLeavesThePreviousCheckpointAndSaysSo) {
  save_sample(storage, run, small_layout(2), 1);
  struct Point {
    FileOperation operation;
    const char* name;
  };
  const Point points[] = {{FileOperation::open, "open"},
                          {FileOperation::write, "write"},
                          {FileOperation::preallocate, "preallocat"},
                          {FileOperation::sync, "sync"},
                          {FileOperation::rename, "rename"},
                          {FileOperation::create_directory, "folder"},
                          {FileOperation::sync_directory, "sync"}};
  int failures = 0;
  for (const Point& point : points) {
    for (int nth = 1;; ++nth) {
      FaultyFileSystem faulty(files);
      const TestStorage failing(faulty);
      Fault fault;
      fault.operation = point.operation;
      fault.nth = nth;
      fault.times = nth % 2 == 0 ? -1 : 1;
      fault.code = ENOSPC;
      faulty.inject(fault);
      RunFolder saves(failing, run, 7);
      const std::string message =
          message_of<CheckpointError>([&] { save_sample(failing, saves, small_layout(2), 2); });
      if (message == "nothing was thrown") {
        const std::string warning = saves.take_warning();
        if (warning.empty()) break;
        // The failure occurred after the checkpoint was complete.
        ++failures;
        ASSERT_THAT(warning, AllOf(HasSubstr("step-00000002 is complete, but"),
                                   AnyOf(HasSubstr("latest"), HasSubstr("sync of the folder")),
                                   HasSubstr("No space left on device")))
            << point.name << " " << nth;
        ASSERT_EQ(newest(run), "step-00000002");
        files.remove_all(run + "/step-00000002");
        continue;
      }
      ++failures;
      ASSERT_THAT(message,
                  AllOf(HasSubstr("No space left on device"), HasSubstr("cannot "), HasSubstr("run")))
          << point.name << " " << nth;
      ASSERT_THAT(newest(run), AnyOf("step-00000001", "step-00000002")) << point.name << " " << nth;
      if (files.exists(run + "/step-00000002")) {  // the failed operation came after the rename
        ASSERT_THAT(message, HasSubstr("sync of the folder")) << point.name << " " << nth;
        files.remove_all(run + "/step-00000002");
      }
    }
    // A successful save removes the stale folders of all of these; then the folder returns to its first
    // state.
    EXPECT_THAT(names(), ElementsAre("latest", "step-00000001", "step-00000002"));
    files.remove_all(run + "/step-00000002");
  }
  EXPECT_GT(failures, 25);
}

TEST_F(CrashTest, StaleFoldersOfDeadSavesAreRemovedAndNobodySavesBesideALiveOne) {
  save_sample(storage, run, small_layout(1), 1);
  // This process has begun to save and waits.
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    RunFolder saves(storage, run, 99);
    saves.prepare(2, 1000);
    if (write(ready[1], "x", 1) == 1) pause();
    _exit(0);
  }
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  RunFolder saves(storage, run, 7);
  EXPECT_THAT(message_of<CheckpointError>([&] { saves.prepare(3, 1000); }),
              AllOf(HasSubstr("is in use by process " + std::to_string(child)),
                    HasSubstr("two runs cannot share a folder")));
  EXPECT_THAT(names(), ElementsAre("latest", "step-00000001", "step-00000002.0000000000000063.tmp"));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  files.create_directories(run + "/step-00000009.0000000000000001.tmp/deep");
  files.create_directories(run + "/mine");  // not created by a run, so it stays
  files.open(run + "/latest.new-0123456789abcdef", OpenMode::create_new);  // left by a process that died
                                                                           // while it replaced the file
  saves.prepare(3, 1000);
  EXPECT_THAT(names(), ElementsAre("latest", "mine", "step-00000001", "step-00000003.0000000000000007.tmp"));
  saves.discard(3);
  EXPECT_THAT(names(), ElementsAre("latest", "mine", "step-00000001"));
  close(ready[0]);
  close(ready[1]);
}

TEST_F(CrashTest, AFolderThatAnotherRunTookOverIsLeftToIt) {
  RunFolder saves(storage, run, 7);
  for (const int step : {1, 2}) save_sample(storage, saves, small_layout(1), step);
  const std::string other =
      R"({"host": "node17", "kernel": "k", "process": 4321, "started": 9, "token": "t", "since": 0, "beat": 1})";
  const auto lease = files.open(join_path(run, std::string(lease_name)), OpenMode::create_or_truncate);
  lease->write(0, other.data(), static_cast<std::int64_t>(other.size()));
  const auto taken_over = HasSubstr("was taken over by process 4321 on node node17");
  EXPECT_THAT(message_of<CheckpointError>([&] { saves.retain({1, 0}); }), taken_over);
  EXPECT_THAT(message_of<CheckpointError>([&] { save_sample(storage, saves, small_layout(1), 3); }),
              taken_over);
  EXPECT_THAT(names(), ElementsAre("latest", "step-00000001", "step-00000002"));
}

TEST_F(CrashTest, WhatPeersHaveTakenOfTheSpaceCountsForTheSave) {
  /// Reports free space as it is while a peer allocates: it is used, although the peer's file has no size
  /// yet.
  class Allocating : public RecordingFileSystem {
   public:
    using RecordingFileSystem::RecordingFileSystem;
    detail::SpaceInfo space(const std::string&) override { return {10'000, 400}; }
    std::optional<detail::FileStatus> status(const std::string& path) override {
      auto found = RecordingFileSystem::status(path);
      if (found && path.ends_with(".h5")) *found = {0, 700, false};
      return found;
    }
  };
  std::filesystem::create_directories(run);
  Allocating allocating(files, run);
  const TestStorage recorded(allocating);
  RunFolder saves(recorded, run, 7);
  files.create_directories(saves.temporary(1));
  (void)files.open(join_path(saves.temporary(1), "shard-00001-of-00002.h5"), OpenMode::create_new);
  saves.prepare(1, 1100);
  EXPECT_THAT(message_of<CheckpointError>([&] { saves.prepare(1, 1101); }),
              HasSubstr("needs 1101 bytes, but only 1100 are free"));
}

TEST_F(CrashTest, RetentionKeepsTheLastAndMilestones) {
  RunFolder saves(storage, run, 7);
  for (const int step : {10, 15, 20, 25, 30, 35}) save_sample(storage, saves, small_layout(1), step);
  EXPECT_THAT(saves.retain({}), IsEmpty());
  EXPECT_THAT(saves.retain({2, 20}), ElementsAre("step-00000025", "step-00000015", "step-00000010"));
  EXPECT_THAT(names(), ElementsAre("latest", "step-00000020", "step-00000030", "step-00000035"));
  EXPECT_THAT(saves.retain({0, 20}), IsEmpty()) << "without a number to keep, all stay";
  EXPECT_THAT(saves.retain({1, 20}), ElementsAre("step-00000030"));
  EXPECT_EQ(newest(run), "step-00000035");
  // This run was resumed from an older step; the newest checkpoint is the one that was saved last.
  RunFolder branch(storage, run, 8, {7});
  save_sample(storage, branch, small_layout(1), 22);
  EXPECT_EQ(newest(run), "step-00000022");
  EXPECT_THAT(branch.retain({1, 0}), ElementsAre("step-00000035", "step-00000020"));
  EXPECT_THAT(verify(storage, run, true), IsEmpty());
}

TEST_F(CrashTest, RetentionKeepsDamagedOnesAndTheDoubtThatTheyCast) {
  RunFolder saves(storage, run, 7);
  const auto save = [&](std::int64_t step, std::int64_t applied, bool doubt) {
    Manifest manifest;
    manifest.layout = small_layout(1);
    manifest.run = sample_run(step);
    manifest.run.applied = applied;
    manifest.run.skipped = 0;
    manifest.run.in_doubt = doubt;
    saves.prepare(step, 1);
    const ShardPlan plan(manifest.layout, 0, step);
    manifest.shards.push_back(write_sample_shard(storage, plan, saves.temporary(step), Way::image));
    return saves.commit(manifest, make_master_image(manifest.layout));
  };
  save(1, 1, false);
  save(2, 2, false);
  const std::string damaged = save(3, 2, true);  // the weights of step 2, which are in doubt
  save(4, 3, false);
  Retention rule{.keep_last = 1, .newest_is_proven = false};
  rule.damaged = {damaged};
  EXPECT_THAT(saves.retain(rule), ElementsAre("step-00000002"))
      << "step 1 is the newest one known to be good";
  EXPECT_THAT(names(), ElementsAre("latest", "step-00000001", "step-00000003", "step-00000004"));
}

TEST_F(CrashTest, WhereAllAreInDoubtTheNewestIsTakenWithANote) {
  RunFolder saves(storage, run, 7);
  for (const std::int64_t step : {1, 2}) {
    Manifest manifest;
    manifest.layout = small_layout(1);
    manifest.run = sample_run(step);
    manifest.run.in_doubt = true;
    saves.prepare(step, 1);
    const ShardPlan plan(manifest.layout, 0, step);
    manifest.shards.push_back(write_sample_shard(storage, plan, saves.temporary(step), Way::image));
    (void)saves.commit(manifest, make_master_image(manifest.layout));
  }
  std::vector<std::string> notes;
  const Listed found = newest_checkpoint(files, run, notes, {});
  EXPECT_EQ(found.path, join_path(run, "step-00000002"));
  EXPECT_THAT(notes, ElementsAre(join_path(run, "step-00000002") +
                                 " may have ruined weights, which gave a loss or gradient that is not "
                                 "finite, and there is no other checkpoint"));
}

TEST_F(CrashTest, DoubtReachesThoseOfTheSameUpdatesAlone) {
  const auto listed = [](std::int64_t applied, std::vector<std::uint64_t> lineage,
                         std::vector<std::int64_t> branches, bool doubt = false) {
    Listed entry;
    entry.manifest.emplace();
    entry.manifest->run.applied = applied;
    entry.manifest->run.in_doubt = doubt;
    entry.manifest->lineage = std::move(lineage);
    entry.manifest->branches = std::move(branches);
    return entry;
  };
  // Run 8 continued from run 7 after 20 updates; its state at 30 and 20 updates is in doubt.
  const std::vector<Listed> late{listed(30, {7, 8}, {0, 20}, true)}, early{listed(20, {7, 8}, {0, 20}, true)};
  EXPECT_FALSE(in_doubt(listed(30, {7}, {0}), late)) << "run 7 made other updates from there on";
  EXPECT_FALSE(in_doubt(listed(20, {7}, {0}), late));
  EXPECT_TRUE(in_doubt(listed(20, {7}, {0}), early)) << "of which run 8 has made none yet";
  EXPECT_TRUE(in_doubt(listed(30, {7, 8}, {0, 20}), late));
  EXPECT_TRUE(in_doubt(listed(30, {7, 8, 9}, {0, 20, 30}), late)) << "a run that went on from those weights";
  EXPECT_FALSE(in_doubt(listed(30, {7, 9}, {0, 20}), late)) << "a sibling that branched off there, too";
  EXPECT_FALSE(in_doubt(listed(30, {9}, {0}), late));
  EXPECT_FALSE(in_doubt(listed(0, {9}, {0}), {listed(0, {7}, {0}, true)}));
  EXPECT_FALSE(in_doubt(listed(30, {8, 8}, {0, 20}), {listed(30, {8}, {0}, true)})) << "a run that went back";
  EXPECT_TRUE(in_doubt(listed(30, {7}, {}), late)) << "a checkpoint that does not say where";
  EXPECT_FALSE(in_doubt(listed(30, {9}, {}), late));
  // A run records in its checkpoints where it branched off.
  RunFolder first(storage, run, 7), second(storage, run, 8, {7}, {0, 5}), unknown(storage, run, 9, {0});
  save_sample(storage, first, small_layout(1), 1);
  save_sample(storage, second, small_layout(1), 2);
  save_sample(storage, unknown, small_layout(1), 3);
  const auto branches = [&](std::int64_t step) {
    return open_manifest(files, join_path(run, step_name(step))).branches;
  };
  EXPECT_THAT(branches(1), ElementsAre(0));
  EXPECT_THAT(branches(2), ElementsAre(0, 5));
  EXPECT_THAT(branches(3), IsEmpty());
}

TEST_F(CrashTest, RetentionKeepsTheLowest) {
  RunFolder saves(storage, run, 7), other(storage, run, 8);
  const auto save = [&](RunFolder& into, std::int64_t step, const std::string& user) {
    save_sample(storage, into, small_layout(1), step, Way::image, 0, user);
  };
  save(other, 1, with_loss(0.5));
  save(saves, 2, R"({"held_out": {"a/b": {"loss": null}}})");
  save(saves, 3, R"({"held_out": 0})");
  save(saves, 4, with_loss(2));
  save(saves, 5, with_loss(2));
  save(saves, 6, with_loss(3));
  save(saves, 7, with_loss(2.25));
  EXPECT_THAT(saves.retain({1, 6, loss_pointer}),
              ElementsAre("step-00000005", "step-00000003", "step-00000002"));
  EXPECT_THAT(names(),
              ElementsAre("latest", "step-00000001", "step-00000004", "step-00000006", "step-00000007"))
      << "of two the first; another run's counts for nothing and stays";
  save(saves, 4,
       with_loss(9));  // replaces the best one, as a run does that resumes from an earlier step
  EXPECT_THAT(saves.retain({1, 0, loss_pointer}), ElementsAre("step-00000006"));
  EXPECT_THAT(saves.retain({1, 0, "/none"}), ElementsAre("step-00000007")) << "where none has a number";
}

TEST_F(CrashTest, CommitAndPrepareSayWhatIsWrong) {
  RunFolder saves(storage, run, 7);
  EXPECT_THAT(message_of<CheckpointError>([&] { saves.prepare(1, std::int64_t{1} << 60); }),
              AllOf(HasSubstr("cannot save step 1 to"), HasSubstr("needs 1152921504606846976 bytes")));
  Manifest manifest;
  manifest.layout = small_layout(2);
  manifest.run = sample_run(1);
  const ShardPlan plan(manifest.layout, 0, 1);
  manifest.shards.push_back(write_sample_shard(storage, plan, saves.temporary(1), Way::image));
  EXPECT_THAT(
      message_of<CheckpointError>([&] { saves.commit(manifest, make_master_image(manifest.layout)); }),
      AllOf(HasSubstr("cannot complete the checkpoint"), HasSubstr("1 of 2 ranks have reported")));
  manifest.shards.push_back(manifest.shards[0]);
  manifest.shards[1].rank = 1;
  manifest.shards[1].file.name = shard_name(1, 2);
  EXPECT_THAT(
      message_of<CheckpointError>([&] { saves.commit(manifest, make_master_image(manifest.layout)); }),
      AllOf(HasSubstr("shard-00001-of-00002.h5 is missing"), HasSubstr("do all ranks see the same folder?")));
  EXPECT_THAT(list_checkpoints(files, run), IsEmpty());
  RunFolder nowhere(storage, "/proc/nowhere", 7);
  EXPECT_THAT(message_of<CheckpointError>([&] { nowhere.prepare(1, 1); }),
              HasSubstr("cannot save step 1 to /proc/nowhere"));
}

}  // namespace
}  // namespace tranche::checkpoint
