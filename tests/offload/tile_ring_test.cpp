// Rings of tiles: the same bytes as a plain array for all regions, buffers and engines; every failure is an
// error with file and range, and never a hang.
#include "offload/tile_ring.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "device/work_recorder.h"
#include "offload/aligned_buffer.h"
#include "tests/core/error_text.h"
#include "tests/core/rounds.h"
#include "tests/offload/faulty_file_system.h"
#include "tests/offload/test_folder.h"
#include "tests/offload/tile_bench.h"
#include "tranche/core/error.h"

namespace tranche {
namespace {

using detail::BlockIoEngine;
using detail::BlockIoOptions;
using detail::IoCall;
using detail::posix_file_system;
using detail::reserve_region;
using detail::TileMemory;
using detail::TileRef;
using detail::TileRegion;
using detail::TileRing;
using test::message_of;
using testing::FaultyFileSystem;
using testing::FileOperation;
using ::testing::HasSubstr;
using testing::pass;
using testing::TestFolder;
using testing::TileBench;
using testing::tiles_of;

std::uint64_t test_seed() {
  if (const char* text = std::getenv("TRANCHE_TEST_SEED")) return std::strtoull(text, nullptr, 10);
  return std::random_device{}();
}

struct Case {
  BlockIoEngine engine;
  int buffers;
};

class TileRingTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (GetParam().engine == BlockIoEngine::uring && TRANCHE_HAS_URING == 0) GTEST_SKIP() << "no liburing";
    io_.engine = GetParam().engine;
    io_.block_bytes = 16384;
    io_.depth = 6;
  }
  BlockIoOptions io_;
  TestFolder folder_;
};

// Many passes, issued far ahead of the stream that processes them.
TEST_P(TileRingTest, ManyTilesManyPasses) {
  TileBench bench(folder_.path(), posix_file_system(), io_);
  const TileRegion region = bench.region(60'001, 1000, {8});
  bench.swap.create();
  TileRing ring = bench.ring(GetParam().buffers, region.bytes_of(0));
  pass(bench, ring, region, false, [](std::int64_t, std::int64_t i) { return 3 * i; });
  for (int round = 1; round <= 5; ++round) {
    pass(bench, ring, region, true,
         [round](std::int64_t value, std::int64_t i) { return value == 3 * i + round - 1 ? value + 1 : -1; });
  }
  std::atomic<int> wrong{0};
  const auto look = [&](std::int64_t value, std::int64_t i) {
    if (value != 3 * i + 5) ++wrong;
    return std::int64_t{0};
  };
  pass(bench, ring, region, true, look, false);  // not written...
  pass(bench, ring, region, true, look, false);  // ...so the next pass sees the same
  bench.stream->synchronize();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(region.tiles(), 61);
  const std::int64_t bytes = region.bytes();
  EXPECT_EQ(ring.counts().bytes_read, 7 * bytes);
  EXPECT_EQ(ring.counts().bytes_written, 6 * bytes);
  EXPECT_EQ(ring.counts().tiles, 8 * 61);
  EXPECT_GT(ring.take_busy_seconds(), 0);
  EXPECT_EQ(ring.take_busy_seconds(), 0) << "nothing is under way";
  const detail::BlockIoStatistics statistics = bench.io->statistics();
  EXPECT_EQ(statistics.read_bytes, 7 * bytes);
  EXPECT_EQ(statistics.written_bytes, 6 * bytes);
  EXPECT_EQ(statistics.direct_bytes, bench.swap.file().direct() ? 13 * bytes : 0);
  EXPECT_EQ(statistics.registered_bytes, GetParam().engine == BlockIoEngine::uring ? 13 * bytes : 0);
}

// The owner of lent memory writes into it until the tile that it is lent after, and as soon as it is given
// back.
TEST_P(TileRingTest, LentMemoryIsUsedBetweenItsOwnersUses) {
  TileBench bench(folder_.path(), posix_file_system(), io_);
  const TileRegion region = bench.region(20'001, 1000, {8});
  bench.swap.create();
  TileRing ring = bench.ring(GetParam().buffers, region.bytes_of(0));
  pass(bench, ring, region, false, [](std::int64_t, std::int64_t i) { return 3 * i; });
  std::vector<detail::AlignedBuffer> owned;
  for (int i = 0; i < 12; ++i)
    owned.emplace_back(bench.host, region.bytes_of(0), Category::gradients, "owned");
  const auto use = [&](std::size_t place, int mark) {
    std::memset(owned[place].data(), mark, static_cast<std::size_t>(owned[place].bytes()));
  };
  std::int64_t added = 0;
  std::atomic<int> wrong{0};
  for (const std::size_t count : {12, 1, 0, 7, 12, 12}) {
    std::vector<detail::LentMemory> lent;
    // Twelve are lent one tile before their own, some of them after tiles that lie in lent memory too.
    const auto after = [count](std::size_t i) { return count == 12 ? i + 8 : i / 2; };
    for (std::size_t i = 0; i < count; ++i) lent.push_back({owned[i].data(), owned[i].bytes(), after(i)});
    const std::vector<Event> given_back = pass(
        bench, ring, region, true,
        [&, after, count, added](std::int64_t value, std::int64_t i) {
          for (std::size_t place = 0; i % 1000 == 999 && place < count; ++place) {
            if (after(place) == static_cast<std::size_t>(i / 1000)) use(place, 0x55);
          }
          wrong += value != 3 * i + added;
          return value + 1;
        },
        true, std::move(lent));
    ++added;
    ASSERT_EQ(given_back.size(), count);
    for (std::size_t i = count; i-- > 0;) {
      given_back[i].wait();
      use(i, 0xaa);
    }
  }
  bench.stream->synchronize();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(ring.counts().bytes_read, 6 * region.bytes());
  EXPECT_EQ(ring.counts().bytes_written, 7 * region.bytes());
}

TEST(TileRing, MemoryThatCannotBeLentIsRefused) {
  const TestFolder folder;
  TileBench bench(folder.path(), posix_file_system(), {});
  const TileRegion region = bench.region(3000, 1000, {8});
  bench.swap.create();
  TileRing ring = bench.ring(2, region.bytes_of(0));
  detail::AlignedBuffer memory(bench.host, region.bytes_of(0), Category::gradients, "owned");
  const auto text_of = [&](const std::vector<detail::LentMemory>& lent) {
    return message_of<InvalidArgument>([&] { ring.begin(tiles_of(region), true, lent); });
  };
  const detail::LentMemory good{memory.data(), memory.bytes(), 0};
  EXPECT_THAT(text_of({good, good, good, good}), HasSubstr("more memory is lent than there are tiles"));
  EXPECT_THAT(text_of({{memory.data(), memory.bytes(), 2}}),
              HasSubstr("memory of tile 2 is lent after tile 2"));
  EXPECT_THAT(text_of({good, good}), HasSubstr("two tiles are lent the same memory"));
  EXPECT_THAT(text_of({{memory.data(), 4096, 0}}), HasSubstr("do not fit buffers of 4096 B"));
}

// Compares any regions, with tiles in any order, some written and some not, with plain arrays.
TEST_P(TileRingTest, AnyRegionsAgainstAnArray) {
  const std::uint64_t seed = test_seed();
  SCOPED_TRACE("again by TRANCHE_TEST_SEED=" + std::to_string(seed));
  for (const int round : test::rounds(6)) {
    std::mt19937_64 random(seed + static_cast<std::uint64_t>(round));
    const auto up_to = [&](std::int64_t n) { return static_cast<std::int64_t>(random() % (n + 1)); };
    TileBench bench(folder_.path(), posix_file_system(), io_);
    std::vector<TileRegion> regions;
    std::int64_t largest = 0;
    for (std::int64_t i = up_to(3); i >= 0; --i) {
      std::vector<std::int64_t> widths;
      for (std::int64_t t = up_to(3); t >= 0; --t) widths.push_back(std::int64_t{1} << up_to(3));
      regions.push_back(bench.region(up_to(20'000), 1 + up_to(6'000), widths));
      if (regions.back().tiles() > 0) largest = std::max(largest, regions.back().bytes_of(0));
    }
    bench.swap.create();
    // The expected bytes, by region and tensor.
    std::vector<std::vector<std::vector<unsigned char>>> model(regions.size());
    for (std::size_t r = 0; r < regions.size(); ++r) {
      for (const std::int64_t width : regions[r].widths) {
        model[r].emplace_back(static_cast<std::size_t>(regions[r].elements * width));
      }
    }
    std::atomic<int> wrong{0};
    TileRing ring = bench.ring(GetParam().buffers, largest);
    std::vector<TileRef> all;
    for (const TileRegion& region : regions) {
      for (const TileRef& ref : tiles_of(region)) {
        all.push_back(ref);
        ASSERT_EQ(region.offset_of(ref.tile) % 4096, 0);
      }
    }
    for (int pass = 0; pass < 6; ++pass) {
      std::vector<TileRef> chosen = all;
      if (pass > 0) {
        std::shuffle(chosen.begin(), chosen.end(), random);
        chosen.resize(static_cast<std::size_t>(up_to(static_cast<std::int64_t>(chosen.size()))));
        // Some tiles occur twice, close together: the second must see what the first wrote.
        for (std::size_t i = chosen.size(); i-- > 0;) {
          if (up_to(4) == 0) chosen.insert(chosen.begin() + static_cast<std::ptrdiff_t>(i), chosen[i]);
        }
      }
      ring.begin(chosen, pass > 0);
      if (pass > 1 && up_to(5) == 0) {
        // Abandoned in the middle; the work that was issued has been done.
        ring.abandon();
        continue;
      }
      for (const TileRef& ref : chosen) {
        const TileMemory memory = ring.open(*bench.stream);
        const bool write = pass == 0 || up_to(2) > 0;
        const auto key = static_cast<unsigned char>(random());
        const auto r = static_cast<std::size_t>(ref.region - regions.data());
        bench.stream->enqueue("work", [&, memory, write, key, r, check = pass > 0] {
          for (std::size_t t = 0; t < memory.data.size(); ++t) {
            const std::int64_t width = regions[r].widths[t];
            auto* bytes = static_cast<unsigned char*>(memory.data[t]);
            unsigned char* expected = model[r][t].data() + memory.first * width;
            const auto count = static_cast<std::size_t>(memory.elements * width);
            if (check && std::memcmp(bytes, expected, count) != 0) ++wrong;
            for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<unsigned char>(i * key + t);
            if (write) std::memcpy(expected, bytes, count);
          }
        });
        ring.close(*bench.stream, write);
      }
      ring.end(*bench.stream);
    }
    bench.stream->synchronize();
    ASSERT_EQ(wrong, 0) << "round " << round;
    for (std::size_t r = 0; r < regions.size(); ++r) {
      for (std::int64_t tile = 0; tile < regions[r].tiles(); ++tile) {
        for (std::size_t t = 0; t < model[r].size(); ++t) {
          const std::int64_t width = regions[r].widths[t];
          std::vector<unsigned char> disk(static_cast<std::size_t>(regions[r].elements_of(tile) * width));
          bench.swap.file().read(
              regions[r].offset_of(tile) + regions[r].offset_in_tile(tile, static_cast<int>(t)), disk.data(),
              static_cast<std::int64_t>(disk.size()));
          ASSERT_EQ(std::memcmp(disk.data(), model[r][t].data() + regions[r].first_element(tile) * width,
                                disk.size()),
                    0)
              << "region " << r << " tile " << tile << " tensor " << t;
        }
      }
    }
  }
}

TEST_P(TileRingTest, FailedTransfersFailTheStreamWithFileAndRange) {
  for (const FileOperation operation : {FileOperation::read, FileOperation::write}) {
    for (const int code : {EIO, ENOSPC}) {
      FaultyFileSystem files(posix_file_system());
      TileBench bench(folder_.path(), files, io_);
      const TileRegion region = bench.region(20'000, 2048, {8});
      bench.swap.create();
      TileRing ring = bench.ring(GetParam().buffers, region.bytes_of(0));
      const auto add = [](std::int64_t value, std::int64_t) { return value + 1; };
      pass(bench, ring, region, false, [](std::int64_t, std::int64_t i) { return i; });
      bench.stream->synchronize();
      files.inject({.operation = operation, .nth = 5, .code = code, .done_bytes = 100});
      pass(bench, ring, region, true, add);
      const std::string text = message_of<IoError>([&] { bench.stream->record().wait(); });
      EXPECT_THAT(text, HasSubstr(operation == FileOperation::read ? "read of bytes " : "write of bytes "));
      EXPECT_THAT(text, HasSubstr("of '" + folder_.path() + "/tranche-swap-"));
      EXPECT_THAT(text, HasSubstr(code == EIO ? "Input/output error" : "No space left"));
      // No operation succeeds silently, on any stream...
      EXPECT_EQ(message_of<IoError>([&] { ring.begin(tiles_of(region)); }), text);
      EXPECT_FALSE(ring.in_pass());
      // ...until the ring is abandoned. A failed stream stays failed; a new one works.
      ring.abandon();
      EXPECT_THROW(bench.stream->synchronize(), IoError);
      bench.stream = bench.device->create_host_stream("again", 1);
      pass(bench, ring, region, true, add, false);
      bench.stream->synchronize();
    }
  }
}

// A stream fails for a reason of its own, at any point of a pass; nothing may wait for ever.
TEST_P(TileRingTest, StreamsThatFail) {
  for (int at = 0; at < 12; ++at) {
    TileBench bench(folder_.path(), posix_file_system(), io_);
    const TileRegion region = bench.region(10 * 512, 512, {8});
    bench.swap.create();
    TileRing ring = bench.ring(GetParam().buffers, region.bytes_of(0));
    if (at == 0) bench.stream->enqueue("bad", [] { throw InvalidArgument("a kernel failed"); });
    pass(bench, ring, region, false, [at](std::int64_t, std::int64_t i) {
      if (i == (at - 1) * 512) throw InvalidArgument("a kernel failed");
      return i;
    });
    if (at < 11) {
      EXPECT_EQ(message_of<InvalidArgument>([&] { bench.stream->synchronize(); }), "a kernel failed");
    }
    bench.stream = bench.device->create_host_stream("again", 1);
    if (at < 11) {
      EXPECT_THAT(message_of<LogicError>([&] { ring.begin(tiles_of(region)); }),
                  HasSubstr("the stream that worked on the tiles has failed"));
      if (at % 2 == 0) continue;  // destroyed in this state
      ring.abandon();
    }
    pass(bench, ring, region, false, [](std::int64_t, std::int64_t i) { return i; });
    bench.stream->synchronize();
  }
}

// Abandoned or destroyed in every state of the issuing thread.
TEST_P(TileRingTest, AbandonedAndDestroyedInEveryState) {
  int point = GetParam().buffers;
  for (const bool read : {true, false}) {
    for (int state = 0; state < 16; ++state) {
      for (const bool destroy : {true, false}) {
        if (!test::swept(point++)) continue;
        FaultyFileSystem slow(posix_file_system());
        TileBench bench(folder_.path(), slow, io_);
        const TileRegion region = bench.region(7 * 512, 512, {8});
        bench.swap.create();
        slow.inject({.operation = FileOperation::read, .times = -1, .delay = std::chrono::milliseconds(1)});
        slow.inject({.operation = FileOperation::write, .times = -1, .delay = std::chrono::milliseconds(1)});
        std::atomic<int> worked{0};
        {
          TileRing ring = bench.ring(GetParam().buffers, region.bytes_of(0));
          ring.begin(tiles_of(region), read);
          for (int i = 0; i < state && i < 14; ++i) {
            if (i % 2 == 1) {
              ring.close(*bench.stream, i % 4 == 1);
              continue;
            }
            const TileMemory memory = ring.open(*bench.stream);
            bench.stream->enqueue("work", [memory, &worked] {
              std::memset(memory.data[0], 1, static_cast<std::size_t>(memory.elements) * 8);
              ++worked;
            });
          }
          if (state == 15) ring.end(*bench.stream);
          if (!destroy) {
            ring.abandon();
            EXPECT_FALSE(ring.in_pass());
            EXPECT_EQ(worked, std::min((state + 1) / 2, 7)) << "what was issued has been done";
            pass(bench, ring, region, true, [](std::int64_t value, std::int64_t) { return value; });
          }
        }
        EXPECT_GE(worked, std::min((state + 1) / 2, 7));
        bench.stream->synchronize();
        EXPECT_EQ(bench.ledger.total(Tier::host), 0) << "buffers are freed, by when nothing uses them";
      }
    }
  }
}

// The nameless file is truncated by another process during the run.
TEST_P(TileRingTest, FileTruncatedUnderTheRun) {
  TileBench bench(folder_.path(), posix_file_system(), io_);
  const TileRegion region = bench.region(20'000, 2048, {8});
  bench.swap.create();
  TileRing ring = bench.ring(GetParam().buffers, region.bytes_of(0));
  pass(bench, ring, region, false, [](std::int64_t, std::int64_t i) { return i; });
  bench.stream->synchronize();
  int cut = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    const std::string target = std::filesystem::read_symlink(entry.path(), ignored);
    if (target.find(folder_.path() + "/tranche-swap-") != 0) continue;
    EXPECT_THAT(target, HasSubstr(" (deleted)"));
    const int descriptor = ::open(entry.path().c_str(), O_RDWR);
    ASSERT_EQ(::ftruncate(descriptor, region.offset_of(4) + 5000), 0);
    ::close(descriptor);
    ++cut;
  }
  ASSERT_GE(cut, 1);
  pass(bench, ring, region, true, [](std::int64_t value, std::int64_t) { return value; });
  const std::string text = message_of<IoError>([&] { bench.stream->synchronize(); });
  EXPECT_THAT(text, HasSubstr("the file ends too early; the file is shorter than it was written"));
  EXPECT_THAT(text, HasSubstr("read of bytes "));
}

TEST_P(TileRingTest, ShortAndInterruptedTransfersAreResumed) {
  std::atomic<int> calls{0};
  const auto hook = [&](IoCall call, std::int64_t bytes) -> std::int64_t {
    if (call != IoCall::read && call != IoCall::write) return bytes;
    const int number = ++calls;
    if (number % 5 == 1) return -EINTR;
    if (number % 5 == 2 && bytes > 8192) return bytes / 2 / 4096 * 4096;
    return number % 5 == 3 ? (bytes + 2) / 3 : bytes;
  };
  const auto files = detail::make_posix_file_system(hook);
  if (GetParam().engine == BlockIoEngine::uring) io_.hook = hook;
  TileBench bench(folder_.path(), GetParam().engine == BlockIoEngine::uring ? posix_file_system() : *files,
                  io_);
  const TileRegion region = bench.region(50'000, 4096, {8});
  bench.swap.create();
  TileRing ring = bench.ring(GetParam().buffers, region.bytes_of(0));
  pass(bench, ring, region, false, [](std::int64_t, std::int64_t i) { return i * i; });
  std::atomic<int> wrong{0};
  pass(bench, ring, region, true, [&](std::int64_t value, std::int64_t i) {
    wrong += value != i * i;
    return value;
  });
  bench.stream->synchronize();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(calls, 50);
}

INSTANTIATE_TEST_SUITE_P(Engines, TileRingTest,
                         ::testing::Values(Case{BlockIoEngine::threads, 1}, Case{BlockIoEngine::threads, 2},
                                           Case{BlockIoEngine::threads, 3}, Case{BlockIoEngine::threads, 5},
                                           Case{BlockIoEngine::uring, 1}, Case{BlockIoEngine::uring, 2},
                                           Case{BlockIoEngine::uring, 3}, Case{BlockIoEngine::uring, 4},
                                           Case{BlockIoEngine::uring, 5}),
                         [](const auto& info) {
                           return std::string(info.param.engine == BlockIoEngine::uring ? "Uring"
                                                                                        : "Threads") +
                                  std::to_string(info.param.buffers);
                         });

// However many buffers read ahead: other transfers of the disk wait behind no more tiles than are allowed.
TEST(TileRingTransfers, NoMoreAreUnderWayThanAllowed) {
  const TestFolder folder;
  std::atomic<int> now[2]{}, most[2]{};  // of reads and writes
  std::atomic<bool> gathers = false;     // transfers wait for two others of their kind, a minute at most
  const auto files = detail::make_posix_file_system([&](IoCall call, std::int64_t bytes) -> std::int64_t {
    if (call != IoCall::read && call != IoCall::write) return bytes;
    const int kind = call == IoCall::read ? 0 : 1;
    int seen = most[kind];
    const int under_way = ++now[kind];
    while (under_way > seen && !most[kind].compare_exchange_weak(seen, under_way)) {
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    do {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    } while (gathers && most[kind] < 3 && std::chrono::steady_clock::now() < end);
    --now[kind];
    return bytes;
  });
  for (const int at_once : {1, 2, 0}) {
    TileBench bench(folder.path(), *files, {.engine = BlockIoEngine::threads, .depth = 8, .hook = {}});
    const TileRegion region = bench.region(8 * 1000, 1000, {8});
    bench.swap.create();
    TileRing ring({.buffers = 6, .buffer_bytes = region.bytes_of(0), .at_once = at_once}, bench.swap,
                  bench.io.get(), bench.host);
    pass(bench, ring, region, false, [](std::int64_t, std::int64_t i) { return i; });
    bench.stream->synchronize();
    most[0] = most[1] = 0;
    gathers = at_once == 0;
    std::atomic<int> wrong{0};
    for (int round = 0; round < 2; ++round) {
      pass(bench, ring, region, true, [&](std::int64_t value, std::int64_t i) {
        wrong += value != i;
        return value;
      });
    }
    bench.stream->synchronize();
    EXPECT_EQ(wrong, 0);
    for (const auto& of_kind : most) {
      if (at_once > 0) {
        EXPECT_LE(of_kind, at_once);
      } else {
        EXPECT_GT(of_kind, 2) << "as many as there are buffers";
      }
    }
  }
}

TEST(TileRingFallback, WorksWhereUringIsRefused) {
  const TestFolder folder;
  BlockIoOptions options;
  options.hook = [](IoCall call, std::int64_t bytes) -> std::int64_t {
    return call == IoCall::uring_setup ? -EPERM : bytes;
  };
  TileBench bench(folder.path(), posix_file_system(), options);
  EXPECT_EQ(bench.io->engine(), BlockIoEngine::threads);
  const TileRegion region = bench.region(10'000, 1000, {8});
  bench.swap.create();
  TileRing ring = bench.ring(4, region.bytes_of(0));
  pass(bench, ring, region, false, [](std::int64_t, std::int64_t i) { return i; });
  std::atomic<int> wrong{0};
  pass(bench, ring, region, true, [&](std::int64_t value, std::int64_t i) {
    wrong += value != i;
    return value;
  });
  bench.stream->synchronize();
  EXPECT_EQ(wrong, 0);
}

TEST(TileRingSimulated, CountsTheSameAndTouchesNothing) {
  detail::TileRingCounts counts[2];
  std::int64_t peaks[2][2];
  for (const bool simulated : {false, true}) {
    const TestFolder folder;
    FaultyFileSystem files(posix_file_system());
    TileBench bench(folder.path(), files, {}, simulated);
    const TileRegion first = bench.region(10'000, 1000, {4, 2, 8});
    const TileRegion second = bench.region(7, 1000, {4});
    bench.swap.create();
    {
      TileRing ring = bench.ring(3, first.bytes_of(0));
      for (const bool read : {false, true, true}) {
        std::vector<TileRef> tiles = tiles_of(first);
        tiles.push_back({&second, 0});
        const std::size_t count = tiles.size();
        ring.begin(std::move(tiles), read);
        for (std::size_t i = 0; i < count; ++i) {
          const TileMemory memory = ring.open(*bench.stream);
          EXPECT_EQ(memory.elements, i + 1 < count ? 1000 : 7);
          EXPECT_EQ(memory.first, i + 1 < count ? static_cast<std::int64_t>(i) * 1000 : 0);
          ring.close(*bench.stream, i % 2 == 0);
        }
        ring.end(*bench.stream);
      }
      bench.stream->synchronize();
      counts[simulated] = ring.counts();
      peaks[simulated][0] = bench.ledger.account(Tier::host).peak;
      peaks[simulated][1] = bench.ledger.account(Tier::nvme).peak;
      ring.begin({{&first, 0}});
      ring.open(*bench.stream);
      ring.abandon();
      if (simulated) {
        EXPECT_EQ(ring.take_busy_seconds(), 0);
        EXPECT_EQ(files.count(FileOperation::open), 0);
      }
    }
    EXPECT_EQ(bench.ledger.total(Tier::host), 0);
  }
  EXPECT_EQ(counts[0].bytes_read, counts[1].bytes_read);
  EXPECT_EQ(counts[0].bytes_written, counts[1].bytes_written);
  EXPECT_EQ(counts[0].tiles, counts[1].tiles);
  EXPECT_EQ(counts[1].bytes_read, 2 * (10 * (4096 + 4096 + 8192) + 4096));
  EXPECT_EQ(peaks[0][0], peaks[1][0]);
  EXPECT_EQ(peaks[0][1], peaks[1][1]);
}

TEST(TileRingSimulated, RecordsThatATileIsReadAgainOnceItIsWritten) {
  const TestFolder folder;
  DeviceOptions options;
  options.kind = DeviceKind::meta;
  options.recorder = detail::WorkRecorder::make(false);
  const auto device = make_device(options);
  const auto stream = device->create_host_stream("host", 1);
  Ledger ledger;
  TrackingResource host(device->memory(Tier::host), ledger);
  detail::SwapFile swap({.directory = folder.path(), .simulated = true}, posix_file_system(), ledger);
  const TileRegion region =
      reserve_region(swap, 4 * 1024, 1024, {4}, Category::optimizer, "states");  // four tiles
  swap.create();
  for (const int buffers : {3, 8}) {
    TileRing ring(
        {.buffers = buffers, .buffer_bytes = region.bytes_of(0), .recorder = options.recorder.get()}, swap,
        nullptr, host);
    const std::size_t begun = options.recorder->work().size();
    std::vector<TileRef> twice = tiles_of(region);
    for (const TileRef& again : tiles_of(region)) twice.push_back(again);
    ring.begin(twice);
    for (std::size_t i = 0; i < twice.size(); ++i) {
      ring.open(*stream);
      ring.close(*stream, true);
    }
    ring.end(*stream);
    std::vector<int> reads, writes;
    for (std::size_t i = begun; i < options.recorder->work().size(); ++i) {
      const detail::WorkKind kind = options.recorder->work()[i].kind;
      if (kind == detail::WorkKind::disk_read) reads.push_back(static_cast<int>(i));
      if (kind == detail::WorkKind::disk_write) writes.push_back(static_cast<int>(i));
    }
    ASSERT_EQ(reads.size(), twice.size());
    ASSERT_EQ(writes.size(), twice.size());
    const auto ahead = static_cast<std::size_t>(std::min(buffers, 4));
    EXPECT_LT(reads[ahead - 1], writes[0]) << "read as soon as the pass begins";
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_THAT(options.recorder->work()[static_cast<std::size_t>(reads[4 + i])].after,
                  ::testing::Contains(writes[buffers == 8 ? i : i + 1]))
          << buffers << " buffers, tile " << i << ": its own write, or that of its buffer's last tile";
    }
  }
}

TEST(TileRegionTest, CutsStartAtMultiplesOf4096) {
  Ledger ledger;
  detail::SwapFile swap({.directory = "x", .simulated = true}, posix_file_system(), ledger);
  swap.reserve(4096, Category::other, "before");
  const TileRegion region = reserve_region(swap, 2500, 1024, {4, 2}, Category::optimizer, "states");
  EXPECT_EQ(region.offset, 4096);
  EXPECT_EQ(region.tiles(), 3);
  EXPECT_EQ(region.elements_of(1), 1024);
  EXPECT_EQ(region.elements_of(2), 452);
  EXPECT_EQ(region.bytes_of(0), 8192);
  EXPECT_EQ(region.bytes_of(2), 8192) << "1808 and 904 bytes, each rounded up";
  EXPECT_EQ(region.offset_in_tile(0, 1), 4096);
  EXPECT_EQ(region.offset_of(2), 4096 + 2 * 8192);
  EXPECT_EQ(region.bytes(), 3 * 8192);
  EXPECT_EQ(swap.bytes(), 4096 + 3 * 8192);
  EXPECT_EQ(ledger.account(Tier::nvme).current[Category::optimizer], 3 * 8192);
  const TileRegion small = reserve_region(swap, 10, 1 << 30, {4}, Category::optimizer, "small");
  EXPECT_EQ(small.bytes(), 4096) << "a region of one short tile takes no more than that";
  const TileRegion empty = reserve_region(swap, 0, 16, {4}, Category::optimizer, "empty");
  EXPECT_EQ(empty.tiles(), 0);
  EXPECT_EQ(empty.bytes(), 0);
  EXPECT_THAT(
      message_of<InvalidArgument>([&] { reserve_region(swap, 10, 0, {4}, Category::optimizer, "wrong"); }),
      HasSubstr("'wrong' on the nvme tier: 10 elements in tiles of 0"));
  EXPECT_THROW(reserve_region(swap, -1, 1, {4}, Category::optimizer, "wrong"), InvalidArgument);
  EXPECT_THROW(reserve_region(swap, 1, 1, {}, Category::optimizer, "wrong"), InvalidArgument);
  EXPECT_THROW(reserve_region(swap, 1, 1, {0}, Category::optimizer, "wrong"), InvalidArgument);
}

TEST(TileRingMisuse, IsNamed) {
  const TestFolder folder;
  TileBench bench(folder.path(), posix_file_system());
  const TileRegion region = bench.region(3000, 1000, {8});
  EXPECT_THROW(TileRing({.buffers = 0, .buffer_bytes = 1}, bench.swap, bench.io.get(), bench.host),
               InvalidArgument);
  EXPECT_THAT(message_of<InvalidArgument>([&] { TileRing({}, bench.swap, nullptr, bench.host); }),
              HasSubstr("needs an I/O engine"));
  TileRing ring = bench.ring(3, region.bytes_of(0));
  Stream& stream = *bench.stream;
  EXPECT_THAT(message_of<LogicError>([&] { ring.begin(tiles_of(region)); }),
              HasSubstr("call create() first"));
  bench.swap.create();
  EXPECT_THAT(message_of<LogicError>([&] { ring.open(stream); }), HasSubstr("call begin() first"));
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                ring.begin({{&region, 3}});
              }),
              HasSubstr("there is no tile 3 in a region of 3"));
  TileRegion beyond = region;
  beyond.offset += 4096;
  EXPECT_THAT(message_of<InvalidArgument>([&] { ring.begin(tiles_of(beyond)); }), HasSubstr("do not fit"));
  EXPECT_FALSE(ring.in_pass());
  ring.begin(tiles_of(region));
  EXPECT_TRUE(ring.in_pass());
  EXPECT_THAT(message_of<LogicError>([&] { ring.begin(tiles_of(region)); }),
              HasSubstr("while a pass is open"));
  EXPECT_THAT(message_of<LogicError>([&] { ring.close(stream, true); }), HasSubstr("close() without open()"));
  ring.open(stream);
  EXPECT_THAT(message_of<LogicError>([&] { ring.open(stream); }),
              HasSubstr("before the last tile was closed"));
  const auto other = bench.device->create_host_stream("other", 1);
  EXPECT_THAT(message_of<LogicError>([&] { ring.close(*other, true); }), HasSubstr("one stream throughout"));
  ring.close(stream, false);
  EXPECT_THAT(message_of<LogicError>([&] { ring.end(stream); }), HasSubstr("before all tiles were opened"));
  ring.abandon();
  ring.begin({});
  EXPECT_THAT(message_of<LogicError>([&] { ring.open(stream); }), HasSubstr("after the last tile"));
  ring.end(stream);
  stream.synchronize();
}

}  // namespace
}  // namespace tranche
