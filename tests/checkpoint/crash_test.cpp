// Loss of power at any moment of a save, and failures of any of its operations.

#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "../offload/faulty_file_system.h"
#include "../offload/recording_file_system.h"
#include "../offload/test_folder.h"
#include "sample.h"
#include "tranche/checkpoint/reader.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {
namespace {

using namespace tranche::testing;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// Small, so that hundreds of saves take seconds.
Layout small_layout(int world) {
  return make_layout({{"u", 1, {{"w", Shape{401}, false, {}}, {"f", Shape{3}, true, {}}}}},
                     {{"m", DataType::bfloat16}}, DataType::float32, DataType::bfloat16, world);
}

class CrashTest : public ::testing::Test {
 protected:
  FileSystem& files = posix_file_system();
  TestFolder folder{fast_folder()};
  TestStorage storage{files};
  const std::string run = folder / "run";

  /// The newest checkpoint of a folder, every byte of it verified.
  std::string newest(const std::string& parent) {
    std::vector<std::string> notes;
    const Listed listed = newest_checkpoint(files, parent, notes);
    for (const Damage& damage : Reader(storage, listed.path).verify()) ADD_FAILURE() << describe(damage);
    return listed.path.substr(listed.path.rfind('/') + 1);
  }
  std::vector<std::string> names() {
    std::vector<std::string> names;
    for (const auto& entry : files.list(run)) names.push_back(entry.name);
    return names;
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
      const std::uint64_t seeds = crash == Crash::torn || crash == Crash::reordered ? 4 : 1;
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

/// The save that replaces a checkpoint of the same step: there is one of them at any moment.
TEST_F(CrashTest, ReplacingTheSameStepNeverLosesBoth) {
  save_sample(storage, run, small_layout(2), 1);
  RecordingFileSystem recording(files, run);
  const TestStorage recorded(recording);
  RunFolder saves(recorded, run, 7);
  save_sample(recorded, saves, small_layout(3), 1, Way::image, 1);
  recording.mark("done");
  EXPECT_THAT(names(), ElementsAre("latest", "step-00000001"));
  EXPECT_EQ(open_manifest(files, run + "/step-00000001").layout.world, 3);
  const std::size_t done = recording.find_mark("done");
  bool old_name = false;
  for (std::size_t prefix = 0; prefix <= done; ++prefix) {
    for (const Crash crash : all_crashes) {
      const std::string left = folder / "left";
      std::filesystem::remove_all(left);
      recording.replay(prefix, {crash, prefix, 512}, left);
      const std::string name = newest(left);
      ASSERT_THAT(name, AnyOf("step-00000001", "step-00000001.old")) << recording.describe(prefix);
      if (name != "step-00000001.old" || old_name) continue;
      // The next save gives it its name back.
      old_name = true;
      RunFolder next(storage, left, 9);
      save_sample(storage, next, small_layout(1), 2);
      EXPECT_EQ(newest(left), "step-00000002");
      EXPECT_TRUE(files.exists(left + "/step-00000001"));
      EXPECT_FALSE(files.exists(left + "/step-00000001.old"));
    }
  }
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
      if (message == "nothing was thrown") break;
      ++failures;
      ASSERT_THAT(message,
                  AllOf(HasSubstr("No space left on device"), HasSubstr("cannot "), HasSubstr("run")))
          << point.name << " " << nth;
      ASSERT_THAT(newest(run), AnyOf("step-00000001", "step-00000002")) << point.name << " " << nth;
      if (files.exists(run + "/step-00000002")) {  // what failed came after the rename
        ASSERT_THAT(message, AnyOf(HasSubstr("latest"), HasSubstr("sync of the folder")))
            << point.name << " " << nth;
        files.remove_all(run + "/step-00000002");
      }
    }
    // Debris of all of these is gone after a save that went through; back to the start.
    EXPECT_THAT(names(), ElementsAre("latest", "step-00000001", "step-00000002"));
    files.remove_all(run + "/step-00000002");
  }
  EXPECT_GT(failures, 25);
}

TEST_F(CrashTest, DebrisOfDeadSavesIsClearedAndLiveOnesAreLeft) {
  save_sample(storage, run, small_layout(1), 1);
  // A process that marks a save as its own and waits.
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    const SaveOwner owner = this_process();
    RunFolder saves(storage, run, 99);
    saves.prepare(2, 1000);
    const char byte = owner.started.empty() ? 'n' : 'y';
    if (write(ready[1], &byte, 1) == 1) pause();
    _exit(0);
  }
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  EXPECT_EQ(byte, 'y');
  RunFolder saves(storage, run, 7);
  EXPECT_THAT(message_of<CheckpointError>([&] { saves.prepare(3, 1000); }),
              AllOf(HasSubstr("process " + std::to_string(child) + " on this host is saving to"),
                    HasSubstr("two runs cannot share a folder")));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  files.create_directories(run + "/step-00000009.0000000000000001.tmp/deep");  // torn before it had an owner
  files.create_directories(run + "/mine");                                     // not ours: left alone
  saves.prepare(3, 1000);
  EXPECT_THAT(names(), ElementsAre("latest", "mine", "step-00000001", "step-00000003.0000000000000007.tmp"));
  saves.discard(3);
  EXPECT_THAT(names(), ElementsAre("latest", "mine", "step-00000001"));
  close(ready[0]);
  close(ready[1]);
}

TEST_F(CrashTest, OwnersAreKnownByHostNumberAndStart) {
  const SaveOwner me = this_process();
  EXPECT_TRUE(is_alive(me));
  SaveOwner other = me;
  other.started += "1";
  EXPECT_FALSE(is_alive(other)) << "another process has the number now";
  other = me;
  other.host += "x";
  EXPECT_FALSE(is_alive(other));
  EXPECT_FALSE(is_alive({}));
}

TEST_F(CrashTest, RetentionKeepsTheLastAndMilestones) {
  RunFolder saves(storage, run, 7);
  for (const int step : {10, 15, 20, 25, 30, 35}) save_sample(storage, saves, small_layout(1), step);
  EXPECT_THAT(saves.retain({}), IsEmpty());
  EXPECT_THAT(saves.retain({2, 20}), ElementsAre("step-00000025", "step-00000015", "step-00000010"));
  EXPECT_THAT(names(), ElementsAre("latest", "step-00000020", "step-00000030", "step-00000035"));
  EXPECT_THAT(saves.retain({0, 20}), ElementsAre("step-00000030")) << "the newest stays";
  EXPECT_EQ(newest(run), "step-00000035");
  // A run that was resumed from an older step: the newest is what was saved last.
  RunFolder branch(storage, run, 8);
  save_sample(storage, branch, small_layout(1), 22);
  EXPECT_EQ(newest(run), "step-00000022");
  EXPECT_THAT(branch.retain({1, 0}), ElementsAre("step-00000035", "step-00000020"));
  EXPECT_THAT(verify(storage, run, true), IsEmpty());
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
  EXPECT_THAT(message_of<CheckpointError>([&] { saves.commit(manifest); }),
              AllOf(HasSubstr("cannot complete the checkpoint"), HasSubstr("1 of 2 ranks have reported")));
  manifest.shards.push_back(manifest.shards[0]);
  manifest.shards[1].rank = 1;
  manifest.shards[1].file.name = shard_name(1, 2);
  EXPECT_THAT(
      message_of<CheckpointError>([&] { saves.commit(manifest); }),
      AllOf(HasSubstr("shard-00001-of-00002.h5 is missing"), HasSubstr("do all ranks see the same folder?")));
  EXPECT_THAT(list_checkpoints(files, run), IsEmpty());
  RunFolder nowhere(storage, "/proc/nowhere", 7);
  EXPECT_THAT(message_of<CheckpointError>([&] { nowhere.prepare(1, 1); }),
              HasSubstr("cannot save step 1 to /proc/nowhere"));
}

}  // namespace
}  // namespace tranche::checkpoint
