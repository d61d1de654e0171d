// Rings of tiles: transfers go on beside the work, as many as there are buffers; shown by transfers that wait
// for the work and work that waits for transfers.
#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tests/offload/faulty_file_system.h"
#include "tests/offload/test_folder.h"
#include "tests/offload/tile_bench.h"

namespace tranche {
namespace {

using testing::FileOperation;
using testing::pass;
using testing::TestFolder;
using testing::TileBench;
using testing::tiles_of;

/// Files whose transfers are told of, and may be held, before they begin.
class WatchedFiles : public FileSystem {
 public:
  using Watch = std::function<void(FileOperation, std::int64_t offset)>;
  explicit WatchedFiles(Watch watch) : watch_(std::move(watch)) {}
  std::unique_ptr<File> open(const std::string& path, OpenMode mode, Caching caching) override {
    return std::make_unique<Watched>(posix_file_system().open(path, mode, caching), watch_);
  }
  void rename(const std::string& from, const std::string& to) override {
    posix_file_system().rename(from, to);
  }
  void remove(const std::string& path) override { posix_file_system().remove(path); }
  bool create_directory(const std::string& path) override {
    return posix_file_system().create_directory(path);
  }
  std::vector<DirectoryEntry> list(const std::string& path) override {
    return posix_file_system().list(path);
  }
  std::optional<FileStatus> status(const std::string& path) override {
    return posix_file_system().status(path);
  }
  SpaceInfo space(const std::string& path) override { return posix_file_system().space(path); }
  void sync_directory(const std::string& path) override { posix_file_system().sync_directory(path); }

 private:
  struct Watched : File {
    Watched(std::unique_ptr<File> the_file, const Watch& the_watch)
        : File(the_file->path()), file(std::move(the_file)), watch(the_watch) {}
    std::int64_t size() const override { return file->size(); }
    void preallocate(std::int64_t bytes) override { file->preallocate(bytes); }
    void read(std::int64_t offset, void* memory, std::int64_t bytes) override {
      watch(FileOperation::read, offset);
      file->read(offset, memory, bytes);
    }
    void write(std::int64_t offset, const void* memory, std::int64_t bytes) override {
      watch(FileOperation::write, offset);
      file->write(offset, memory, bytes);
    }
    void truncate(std::int64_t bytes) override { file->truncate(bytes); }
    void sync() override { file->sync(); }
    std::unique_ptr<File> file;
    const Watch& watch;
  };
  Watch watch_;
};

/// Things that have happened, to be waited for.
class Happenings {
 public:
  void note(const std::string& what) {
    {
      const std::lock_guard lock(mutex_);
      seen_.push_back(what);
    }
    changed_.notify_all();
  }
  /// False after a minute in which it did not happen.
  bool await(const std::string& what) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::minutes(1),
                             [&] { return std::find(seen_.begin(), seen_.end(), what) != seen_.end(); });
  }
  bool has(const std::string& what) {
    const std::lock_guard lock(mutex_);
    return std::find(seen_.begin(), seen_.end(), what) != seen_.end();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> seen_;
};

struct GatedCase {
  int buffers;
  std::vector<std::string> held;  ///< transfers that must be under way while tile 3 is worked on
};
class TileRingGates : public ::testing::TestWithParam<GatedCase> {};

// None of these transfers ends before the work on tile 3 has seen all of them under way.
TEST_P(TileRingGates, ReadsAheadAndWritesBehindTheWork) {
  const TestFolder folder;
  Happenings happenings;
  std::atomic<std::int64_t> tile_bytes{0};
  std::atomic<bool> armed{false};
  WatchedFiles files([&](FileOperation operation, std::int64_t offset) {
    if (!armed) return;
    const std::string what =
        (operation == FileOperation::read ? "read " : "write ") + std::to_string(offset / tile_bytes);
    happenings.note(what);
    const auto& held = GetParam().held;
    if (std::find(held.begin(), held.end(), what) != held.end()) happenings.await("go on");
  });
  TileBench bench(folder.path(), files,
                  {.engine = BlockIoEngine::threads, .block_bytes = 1 << 20, .depth = 8, .hook = {}});
  const TileRegion region = bench.region(10 * 512, 512, {8});
  tile_bytes = region.bytes_of(0);
  bench.swap.create();
  TileRing ring = bench.ring(GetParam().buffers, region.bytes_of(0));
  pass(bench, ring, region, false, [](std::int64_t, std::int64_t i) { return i; });
  bench.stream->synchronize();
  armed = true;
  std::atomic<int> missing{0}, wrong{0};
  pass(bench, ring, region, true, [&](std::int64_t value, std::int64_t i) {
    wrong += value != i;
    if (i == 3 * 512) {
      for (const std::string& what : GetParam().held) missing += !happenings.await(what);
      happenings.note("go on");
    }
    return value;
  });
  bench.stream->synchronize();
  EXPECT_EQ(missing, 0);
  EXPECT_EQ(wrong, 0);
}

INSTANTIATE_TEST_SUITE_P(Buffers, TileRingGates,
                         ::testing::Values(GatedCase{2, {"write 2"}}, GatedCase{2, {"read 4"}},
                                           GatedCase{3, {"read 4", "write 2"}},
                                           GatedCase{4, {"read 4", "read 5", "write 2"}},
                                           GatedCase{5, {"read 4", "read 5", "write 2", "write 1"}}),
                         [](const auto& info) {
                           return std::to_string(info.param.buffers) + "Buffers" + std::to_string(info.index);
                         });

// The buffer of a written tile gets its next read while the stream is busy with something else.
TEST(TileRingOverlap, ABufferIsReadAgainWithoutTheStream) {
  const TestFolder folder;
  Happenings happenings;
  std::atomic<std::int64_t> tile_bytes{1};
  WatchedFiles files([&](FileOperation operation, std::int64_t offset) {
    if (operation == FileOperation::read) happenings.note(std::to_string(offset / tile_bytes));
  });
  TileBench bench(folder.path(), files, {.engine = BlockIoEngine::threads, .hook = {}});
  const TileRegion region = bench.region(6 * 512, 512, {8});
  tile_bytes = region.bytes_of(0);
  bench.swap.create();
  TileRing ring = bench.ring(3, region.bytes_of(0));
  std::atomic<bool> early{false}, seen{false};
  pass(bench, ring, region, true, [&](std::int64_t, std::int64_t i) {
    // While tile 1 is worked on, tile 0 is written, and tile 3 read into its buffer; not tile 4.
    if (i == 512) {
      seen = happenings.await("3");
      early = happenings.has("4");
    }
    return i;
  });
  bench.stream->synchronize();
  EXPECT_TRUE(seen);
  EXPECT_FALSE(early);
}

// begin() alone starts reading: nothing has been issued to the stream.
TEST(TileRingOverlap, BeginReads) {
  const TestFolder folder;
  Happenings happenings;
  WatchedFiles files([&](FileOperation operation, std::int64_t offset) {
    if (operation == FileOperation::read) happenings.note(std::to_string(offset));
  });
  TileBench bench(folder.path(), files, {.engine = BlockIoEngine::threads, .hook = {}});
  const TileRegion region = bench.region(6 * 512, 512, {8});
  bench.swap.create();
  TileRing ring = bench.ring(3, region.bytes_of(0));
  ring.begin(tiles_of(region));
  EXPECT_TRUE(happenings.await("0"));
  EXPECT_TRUE(happenings.await("4096"));
  EXPECT_TRUE(happenings.await("8192"));
  ring.abandon();
  EXPECT_FALSE(happenings.has("12288")) << "only so many as there are buffers";
}

}  // namespace
}  // namespace tranche
