// Other tests rely on this layer: the state that it produces for a crash must be one that POSIX allows.
#include "tests/offload/recording_file_system.h"

#include <gmock/gmock.h>

#include <atomic>
#include <set>
#include <thread>

#include "offload/block_io.h"
#include "tests/offload/faulty_file_system.h"
#include "tests/offload/test_folder.h"
#include "tests/offload/watched_file_system.h"
#include "tranche/core/error.h"

namespace tranche::testing {
namespace {

using detail::Caching;
using detail::FileSystem;
using detail::OpenMode;
using detail::posix_file_system;
using ::testing::HasSubstr;

class RecordingTest : public ::testing::Test {
 protected:
  RecordingTest() { std::filesystem::create_directories(folder_ / "root"); }
  // The content of a file after a crash; "-" if its name does not exist.
  std::string after(const RecordingFileSystem& files, std::size_t prefix, CrashPolicy policy,
                    const std::string& name) {
    const std::string place = folder_ / "replay";
    std::filesystem::remove_all(place);
    files.replay(prefix, policy, place);
    FileSystem& plain = posix_file_system();
    return plain.exists(place + "/" + name) ? plain.read_file(place + "/" + name) : "-";
  }
  static void put(detail::File& file, std::int64_t offset, std::string_view text) {
    file.write(offset, text.data(), static_cast<std::int64_t>(text.size()));
  }
  TestFolder folder_;
  std::string root_ = folder_ / "root";
};

TEST_F(RecordingTest, OnlyWhatASyncCoversIsDurable) {
  posix_file_system().replace_file(root_ + "/before", "old");
  RecordingFileSystem files(posix_file_system(), root_);
  auto file = files.open(root_ + "/a", OpenMode::create_new, Caching::buffered);  // 0
  put(*file, 0, "one");                                                           // 1
  file->sync();                                                                   // 2
  put(*file, 3, "two");                                                           // 3
  files.sync_directory(root_);                                                    // 4
  file->sync();                                                                   // 5
  ASSERT_EQ(files.operations(), 6u);
  EXPECT_EQ(files.durable_by(0), 4u);
  EXPECT_EQ(files.durable_by(1), 2u);
  EXPECT_EQ(files.durable_by(3), 5u);
  EXPECT_EQ(after(files, 6, {Crash::dropped}, "before"), "old");
  EXPECT_EQ(after(files, 4, {Crash::dropped}, "a"), "-") << "a file's sync says nothing of its name";
  EXPECT_EQ(after(files, 4, {Crash::kept}, "a"), "onetwo");
  EXPECT_EQ(after(files, 5, {Crash::dropped}, "a"), "one");
  EXPECT_EQ(after(files, 6, {Crash::dropped}, "a"), "onetwo");
  EXPECT_EQ(files.describe(3), "3: write of 3 B at 3 of a");
}

// The classic mistake: a rename before the sync. After a crash the new name may exist with an empty file.
TEST_F(RecordingTest, ARenameMayOvertakeTheContent) {
  posix_file_system().replace_file(root_ + "/a", "old");
  const auto save = [&](FileSystem& files, bool sync) {
    auto file = files.open(root_ + "/a.tmp", OpenMode::create_or_truncate, Caching::buffered);
    put(*file, 0, "new");
    if (sync) file->sync();
    files.rename(root_ + "/a.tmp", root_ + "/a");
    files.sync_directory(root_);
  };
  for (const bool sync : {false, true}) {
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_);
    posix_file_system().replace_file(root_ + "/a", "old");
    RecordingFileSystem files(posix_file_system(), root_);
    save(files, sync);
    std::set<std::string> seen;
    for (std::size_t prefix = 0; prefix <= files.operations(); ++prefix) {
      for (const Crash crash : all_crashes) {
        const bool drawn = crash == Crash::torn || crash == Crash::reordered;
        for (std::uint64_t seed = 0; seed < (drawn ? 8u : 1u); ++seed) {
          seen.insert(after(files, prefix, {crash, seed}, "a"));
        }
      }
    }
    if (sync) {
      EXPECT_EQ(seen, (std::set<std::string>{"old", "new"}));
    } else {
      EXPECT_TRUE(seen.count("old") == 1 && seen.count("new") == 1 && seen.count("") == 1);
    }
    EXPECT_EQ(after(files, files.operations(), {Crash::dropped}, "a"), sync ? "new" : "");
  }
}

// A sync covers writes that were complete when it began, not those that came while it ran.
TEST_F(RecordingTest, AWriteDuringASyncIsNotCoveredByIt) {
  std::atomic<bool> syncs{false}, wrote{false};
  WatchedFileSystem slow([&](FileOperation operation, std::int64_t) {
    if (operation != FileOperation::sync) return;
    syncs = true;
    while (!wrote) std::this_thread::yield();
  });
  RecordingFileSystem files(slow, root_);
  auto file = files.open(root_ + "/a", OpenMode::create_new, Caching::buffered);  // 0
  put(*file, 0, "before");                                                        // 1
  std::thread sync([&] { file->sync(); });                                        // 3
  while (!syncs) std::this_thread::yield();
  put(*file, 6, "during");  // 2
  wrote = true;
  sync.join();
  ASSERT_EQ(files.operation(3).kind, RecordedOperation::Kind::sync) << "it ended after the write";
  EXPECT_EQ(files.durable_by(1), 3u);
  EXPECT_EQ(files.durable_by(2), std::nullopt);
}

TEST_F(RecordingTest, WritesAreTornAtSectors) {
  RecordingFileSystem files(posix_file_system(), root_);
  auto file = files.open(root_ + "/a", OpenMode::create_new, Caching::buffered);
  files.sync_directory(root_);
  put(*file, 0, std::string(10'000, 'a'));
  file->sync();
  put(*file, 100, std::string(9'000, 'b'));
  files.mark("written");
  for (const std::int64_t sector : {512, 4096}) {
    bool torn = false;
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      const std::string got = after(files, files.find_mark("written"), {Crash::torn, seed, sector}, "a");
      ASSERT_EQ(got.size(), 10'000u);
      for (std::size_t i = 1; i < got.size(); ++i) {
        if (got[i] == got[i - 1] || i == 100 || i == 9'100) continue;
        torn = true;
        ASSERT_EQ(i % static_cast<std::size_t>(sector), 0u) << "seed " << seed;
      }
    }
    EXPECT_TRUE(torn);
  }
  EXPECT_EQ(after(files, 3, {Crash::dropped}, "a"), "");
  EXPECT_EQ(after(files, 4, {Crash::dropped}, "a"), std::string(10'000, 'a'));
}

// Folders keep their contents when they are renamed, and a sync under the old name counts.
TEST_F(RecordingTest, RenamedFolders) {
  RecordingFileSystem files(posix_file_system(), root_);
  files.create_directories(root_ + "/step.tmp");
  auto file = files.open(root_ + "/step.tmp/a", OpenMode::create_new, Caching::buffered);
  put(*file, 0, "payload");
  file->sync();
  files.sync_directory(root_ + "/step.tmp");
  files.mark("before");
  files.rename(root_ + "/step.tmp", root_ + "/step");
  files.mark("renamed");
  files.sync_directory(root_);
  const std::size_t renamed = files.find_mark("renamed");
  EXPECT_EQ(after(files, renamed, {Crash::dropped}, "step/a"), "-");
  EXPECT_EQ(after(files, renamed, {Crash::dropped}, "step.tmp/a"), "payload");
  EXPECT_EQ(after(files, renamed + 2, {Crash::dropped}, "step/a"), "payload");
  EXPECT_EQ(after(files, renamed + 2, {Crash::dropped}, "step.tmp/a"), "-");
  put(*file, 0, "PAYLOAD");
  files.remove_all(root_ + "/step");
  EXPECT_EQ(after(files, files.operations(), {Crash::kept}, "step/a"), "-");
  EXPECT_EQ(after(files, files.operations(), {Crash::dropped}, "step/a"), "payload");
}

TEST_F(RecordingTest, AsynchronousTransfersAreRecordedByBlock) {
  RecordingFileSystem files(posix_file_system(), root_);
  auto file = files.open(root_ + "/a", OpenMode::create_new, Caching::direct);
  EXPECT_FALSE(file->native());
  detail::BlockIoOptions options;
  options.block_bytes = 4096;
  const auto io = detail::make_block_io(options);
  const std::string data(10'000, 'x');
  io->wait(io->write(*file, 50, data.data(), 10'000));
  EXPECT_EQ(files.operations(), 4u) << "creation and three blocks";
  EXPECT_EQ(after(files, 4, {Crash::kept}, "a"), std::string(50, '\0') + data);
}

TEST_F(RecordingTest, FilesMadePastItAreTakenUpUnsynced) {
  RecordingFileSystem files(posix_file_system(), root_);
  posix_file_system().replace_file(root_ + "/a", "shell");
  auto file = files.open(root_ + "/a", OpenMode::update, Caching::buffered);
  file->sync();
  files.sync_directory(root_);
  EXPECT_EQ(after(files, 2, {Crash::dropped}, "a"), "-");
  EXPECT_EQ(after(files, 4, {Crash::dropped}, "a"), "shell");
}

TEST_F(RecordingTest, Misuse) {
  RecordingFileSystem files(posix_file_system(), root_);
  try {
    files.open(folder_ / "elsewhere", OpenMode::create_new, Caching::buffered);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.message(), HasSubstr("is not below the recorded folder"));
  }
  EXPECT_THROW(files.find_mark("nothing"), LogicError);
  EXPECT_THROW(files.replay(1, {}, folder_ / "replay"), InvalidArgument);
}

}  // namespace
}  // namespace tranche::testing
