// Rings of tiles: as many transfers as there are buffers run while tiles are processed. This is shown by
// transfers that wait for the work and work that waits for transfers.
#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "offload/aligned_buffer.h"
#include "tests/offload/test_folder.h"
#include "tests/offload/tile_bench.h"
#include "tests/offload/watched_file_system.h"

namespace tranche {
namespace {

using detail::BlockIoEngine;
using detail::TileRegion;
using detail::TileRing;
using testing::FileOperation;
using testing::pass;
using testing::TestFolder;
using testing::TileBench;
using testing::tiles_of;
using testing::WatchedFileSystem;

/// Events by name, for which threads can wait.
class Happenings {
 public:
  void note(const std::string& what) {
    {
      const std::lock_guard lock(mutex_);
      seen_.push_back(what);
    }
    changed_.notify_all();
  }
  /// Returns false if it has not happened after a minute.
  bool await(const std::string& what) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::minutes(1),
                             [&] { return std::find(seen_.begin(), seen_.end(), what) != seen_.end(); });
  }
  /// The events so far whose names begin with `start`, in order.
  std::vector<std::string> seen(const std::string& start) {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> result;
    for (const std::string& what : seen_) {
      if (what.starts_with(start)) result.push_back(what);
    }
    return result;
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
  std::vector<std::string> held;  ///< transfers that must be in progress while tile 3 is processed
};
class TileRingGates : public ::testing::TestWithParam<GatedCase> {};

// None of these transfers ends before the work on tile 3 has seen all of them in progress.
TEST_P(TileRingGates, ReadsAheadAndWritesBehindTheWork) {
  const TestFolder folder;
  Happenings happenings;
  std::atomic<std::int64_t> tile_bytes{0};
  std::atomic<bool> armed{false};
  WatchedFileSystem files([&](FileOperation operation, std::int64_t offset) {
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

// The buffer of a written tile is read into again while the stream is busy with other work.
TEST(TileRingOverlap, ABufferIsReadAgainWithoutTheStream) {
  const TestFolder folder;
  Happenings happenings;
  std::atomic<std::int64_t> tile_bytes{1};
  WatchedFileSystem files([&](FileOperation operation, std::int64_t offset) {
    if (operation == FileOperation::read) happenings.note(std::to_string(offset / tile_bytes));
  });
  TileBench bench(folder.path(), files, {.engine = BlockIoEngine::threads, .hook = {}});
  const TileRegion region = bench.region(6 * 512, 512, {8});
  tile_bytes = region.bytes_of(0);
  bench.swap.create();
  TileRing ring = bench.ring(3, region.bytes_of(0));
  std::atomic<bool> early{false}, seen{false};
  pass(bench, ring, region, true, [&](std::int64_t, std::int64_t i) {
    // While tile 1 is processed, tile 0 is written and tile 3 is read into its buffer, but not tile 4.
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

/// A ring of one buffer, and ten tiles of which the last four are in lent memory. Notes each transfer when it
/// begins. The transfer `held` waits for `until`.
struct LentBench {
  LentBench(const std::string& held, const std::string& until)
      : files([this, held, until](FileOperation operation, std::int64_t offset) {
          if (!armed) return;
          const std::string what =
              (operation == FileOperation::read ? "read " : "write ") + std::to_string(offset / tile_bytes);
          happenings.note(what);
          if (what == held && !happenings.await(until)) late = true;
        }),
        bench(folder.path(), files,
              {.engine = BlockIoEngine::threads, .block_bytes = 1 << 20, .depth = 8, .hook = {}}),
        region(bench.region(10 * 512, 512, {8})) {
    tile_bytes = region.bytes_of(0);
    bench.swap.create();
    ring.emplace(detail::TileRingOptions{.buffers = 1, .buffer_bytes = tile_bytes}, bench.swap,
                 bench.io.get(), bench.host);
    for (int i = 0; i < 4; ++i) memory.emplace_back(bench.host, tile_bytes, Category::gradients, "owned");
    pass(bench, *ring, region, false, [](std::int64_t, std::int64_t i) { return i; });
    bench.stream->synchronize();
    armed = true;
  }
  std::vector<detail::LentMemory> lent() const {
    std::vector<detail::LentMemory> result;
    for (const detail::AlignedBuffer& buffer : memory) result.push_back({buffer.data(), buffer.bytes(), 0});
    return result;
  }

  const TestFolder folder;
  Happenings happenings;
  std::atomic<std::int64_t> tile_bytes{1};
  std::atomic<bool> armed{false}, late{false};
  WatchedFileSystem files;
  TileBench bench;
  TileRegion region;
  std::optional<TileRing> ring;
  std::vector<detail::AlignedBuffer> memory;
};

// While the last write from the ring's buffer is under way, the tiles in lent memory are read and updated.
// The last of them is written first, because its owner wants it back first.
TEST(TileRingOverlap, LentMemoryIsWrittenLastAndFromItsEnd) {
  LentBench lends("write 5", "left 9");
  lends.ring->begin(tiles_of(lends.region), true, lends.lent());
  for (int tile = 0; tile < 10; ++tile) {
    (void)lends.ring->open(*lends.bench.stream);
    lends.ring->close(*lends.bench.stream, true);
    lends.bench.stream->enqueue("note", [&, tile] { lends.happenings.note("left " + std::to_string(tile)); });
  }
  (void)lends.ring->end(*lends.bench.stream);
  lends.bench.stream->synchronize();
  EXPECT_FALSE(lends.late) << "a tile in lent memory waited for a write";
  EXPECT_THAT(lends.happenings.seen("write"),
              ::testing::ElementsAre("write 0", "write 1", "write 2", "write 3", "write 4", "write 5",
                                     "write 9", "write 8", "write 7", "write 6"));
}

// A write may begin once read 9 has been submitted, even if a thread of the disk begins the write first. So
// the test looks while read 8 is held, because read 9 is submitted only when read 8 has ended.
TEST(TileRingOverlap, LentMemoryIsNotWrittenBeforeTheLastRead) {
  LentBench lends("read 8", "left 7");
  std::vector<std::string> before;
  pass(
      lends.bench, *lends.ring, lends.region, true,
      [&](std::int64_t value, std::int64_t i) {
        if (i == 8 * 512 - 1) {
          EXPECT_TRUE(lends.happenings.await("write 5"));
          std::this_thread::sleep_for(std::chrono::milliseconds(20));  // a wrong write of tile 6 would begin
          before = lends.happenings.seen("write");
          lends.happenings.note("left 7");
        }
        return value;
      },
      true, lends.lent());
  lends.bench.stream->synchronize();
  EXPECT_FALSE(lends.late);
  EXPECT_THAT(before,
              ::testing::ElementsAre("write 0", "write 1", "write 2", "write 3", "write 4", "write 5"));
  EXPECT_THAT(lends.happenings.seen("write"), ::testing::SizeIs(10));
}

// The next pass, which cannot read all of its tiles before these writes have ended, does not hold them up.
TEST(TileRingOverlap, LentMemoryIsGivenBackWhileTheNextPassReads) {
  LentBench lends("write 0", "second pass");
  const auto keep = [](std::int64_t value, std::int64_t) { return value; };
  const std::vector<Event> given_back =
      pass(lends.bench, *lends.ring, lends.region, true, keep, true, lends.lent());
  lends.bench.stream->enqueue("note", [&] { lends.happenings.note("given back"); });
  lends.ring->begin(tiles_of(lends.region), true, lends.lent());
  lends.happenings.note("second pass");
  EXPECT_TRUE(lends.happenings.await("given back"));
  lends.ring->abandon();
  EXPECT_FALSE(lends.late);
}

// begin() alone starts reading; nothing has been issued to the stream.
TEST(TileRingOverlap, BeginReads) {
  const TestFolder folder;
  Happenings happenings;
  WatchedFileSystem files([&](FileOperation operation, std::int64_t offset) {
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
