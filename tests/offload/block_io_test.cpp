// Both engines of block_io.h: any range, any memory, any number of threads, and short transfers by the
// kernel.
#include "offload/block_io.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "offload/aligned_buffer.h"
#include "tests/offload/faulty_file_system.h"
#include "tests/offload/test_folder.h"
#include "tests/offload/watched_file_system.h"
#include "tranche/core/error.h"
#include "tranche/device/memory_resources.h"

namespace tranche {
namespace {

using detail::AlignedBuffer;
using detail::BlockIoEngine;
using detail::BlockIoOptions;
using detail::Caching;
using detail::File;
using detail::IoCall;
using detail::IoTicket;
using detail::make_block_io;
using detail::OpenMode;
using detail::posix_file_system;
using testing::FaultyFileSystem;
using testing::FileOperation;
using ::testing::HasSubstr;
using testing::TestFolder;
using testing::WatchedFileSystem;

struct Case {
  BlockIoEngine engine;
  Caching caching;
};

class BlockIoTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (GetParam().engine == BlockIoEngine::uring && TRANCHE_HAS_URING == 0) GTEST_SKIP() << "no liburing";
    options_.engine = GetParam().engine;
    options_.block_bytes = 16384;
    options_.depth = 5;
  }
  BlockIoOptions options_;
  TestFolder folder_;
  detail::FileSystem& files_ = posix_file_system();
};

std::vector<std::byte> pattern(std::size_t bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> result(bytes);
  for (auto& byte : result) byte = static_cast<std::byte>(random());
  return result;
}

// Compares ranges that begin and end anywhere, in memory that begins anywhere, with a plain array.
TEST_P(BlockIoTest, AnyRangeOfAnyMemory) {
  constexpr std::int64_t file_bytes = 300'000;
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto io = make_block_io(options_);
  const auto file = files_.open(folder_ / "a", OpenMode::create_new, GetParam().caching);
  std::vector<std::byte> expected(file_bytes);
  file->preallocate(file_bytes);

  const auto host = make_host_resource(Tier::host);
  AlignedBuffer memory(*host, file_bytes + 4096, Category::workspace, "test");
  auto* base = static_cast<std::byte*>(memory.data());
  for (int round = 0; round < 30; ++round) {
    // Disjoint ranges, written at the same time in a random order.
    std::vector<std::int64_t> cuts{0, file_bytes};
    for (int i = 0; i < 8; ++i) {
      std::int64_t cut = static_cast<std::int64_t>(random() % file_bytes);
      if (random() % 2 == 0) cut = cut / 4096 * 4096 + static_cast<std::int64_t>(random() % 3) - 1;
      cuts.push_back(std::max<std::int64_t>(cut, 0));
    }
    std::sort(cuts.begin(), cuts.end());
    const std::int64_t shift = random() % 2 == 0 ? 0 : static_cast<std::int64_t>(random() % 4096);
    const auto data = pattern(file_bytes, random());
    std::memcpy(base + shift, data.data(), data.size());
    std::vector<std::size_t> order(cuts.size() - 1);
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    std::vector<IoTicket> tickets;
    for (const std::size_t i : order) {
      if (random() % 3 == 0) continue;
      const std::int64_t bytes = cuts[i + 1] - cuts[i];
      tickets.push_back(io->write(*file, cuts[i], base + shift + cuts[i], bytes));
      std::copy_n(data.begin() + cuts[i], bytes, expected.begin() + cuts[i]);
    }
    for (const IoTicket ticket : tickets) io->wait(ticket);
    std::memset(base, 0xee, static_cast<std::size_t>(memory.bytes()));
    for (const std::size_t i : order) io->read(*file, cuts[i], base + shift + cuts[i], cuts[i + 1] - cuts[i]);
    io->drain();
    ASSERT_EQ(std::memcmp(base + shift, expected.data(), expected.size()), 0) << "round " << round;
  }
  EXPECT_EQ(file->size(), file_bytes);
  std::vector<std::byte> plain(file_bytes);
  files_.open(folder_ / "a", OpenMode::read)->read(0, plain.data(), file_bytes);
  EXPECT_EQ(plain, expected);
}

TEST_P(BlockIoTest, OddSizes) {
  const auto io = make_block_io(options_);
  const auto file = files_.open(folder_ / "a", OpenMode::create_new, GetParam().caching);
  const auto host = make_host_resource(Tier::host);
  AlignedBuffer memory(*host, 200'000, Category::workspace, "test");
  auto* bytes = static_cast<std::byte*>(memory.data());
  for (const std::int64_t size :
       {0, 1, 511, 512, 4095, 4096, 4097, 8191, 16383, 16384, 16385, 65537, 81920, 99991}) {
    file->truncate(0);
    const auto data = pattern(static_cast<std::size_t>(size), static_cast<std::uint64_t>(size));
    std::copy(data.begin(), data.end(), bytes);
    io->wait(io->write(*file, 0, bytes, size));
    EXPECT_EQ(file->size(), size) << "nothing is padded";
    std::memset(bytes, 0xee, 200'000);
    io->wait(io->read(*file, 0, bytes, size));
    EXPECT_TRUE(std::equal(data.begin(), data.end(), bytes)) << size;
    EXPECT_EQ(bytes[size], std::byte{0xee}) << "nothing beyond the range is touched";
  }
}

// Many threads use one engine; each writes its own part of two files and reads it back.
TEST_P(BlockIoTest, ManyThreads) {
  const auto io = make_block_io(options_);
  std::unique_ptr<File> files[] = {files_.open(folder_ / "a", OpenMode::create_new, GetParam().caching),
                                   files_.open(folder_ / "b", OpenMode::create_new, GetParam().caching)};
  constexpr std::int64_t part = 50'021;  // parts meet inside a block
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 20; ++round) {
        const auto data = pattern(part, static_cast<std::uint64_t>(100 * t + round));
        std::vector<std::byte> back(part);
        File& file = *files[(t + round) % 2];
        io->wait(io->write(file, t * part, data.data(), part));
        const IoTicket ticket = io->read(file, t * part, back.data(), part);
        while (!io->done(ticket)) std::this_thread::yield();
        io->wait(ticket);
        if (back != data) ++wrong[static_cast<std::size_t>(t)];
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

TEST_P(BlockIoTest, CountsBytesAndBlocks) {
  const auto io = make_block_io(options_);
  const auto file = files_.open(folder_ / "a", OpenMode::create_new, GetParam().caching);
  const auto host = make_host_resource(Tier::host);
  AlignedBuffer memory(*host, 100'000, Category::workspace, "test");
  const auto registration = io->register_memory(memory.data(), 100'000);
  EXPECT_EQ(registration->registered(), registration->refusal().empty());
  io->wait(io->write(*file, 0, memory.data(), 100'000));
  io->wait(io->read(*file, 0, memory.data(), 40'960));
  const detail::BlockIoStatistics counted = io->statistics();
  EXPECT_EQ(counted.written_bytes, 100'000);
  EXPECT_EQ(counted.read_bytes, 40'960);
  // 6 full blocks of 16384 and a short one; 2.5 blocks.
  EXPECT_EQ(counted.blocks, 7 + 3);
  EXPECT_EQ(counted.direct_bytes, file->direct() ? 98'304 + 40'960 : 0);  // whole blocks of 4096
  EXPECT_EQ(counted.resumed, 0);
  EXPECT_EQ(counted.registered_bytes, registration->registered() ? 140'960 : 0);
}

TEST_P(BlockIoTest, FailuresSurfaceInWait) {
  const auto io = make_block_io(options_);
  const auto file = files_.open(folder_ / "a", OpenMode::create_new, GetParam().caching);
  file->truncate(50'000);
  std::vector<std::byte> memory(200'000);
  const IoTicket beyond = io->read(*file, 40'000, memory.data(), 100'000);
  const IoTicket within = io->read(*file, 0, memory.data() + 100'000, 50'000);
  try {
    io->wait(beyond);
    FAIL();
  } catch (const IoError& error) {
    EXPECT_EQ(error.code(), 0);
    EXPECT_THAT(error.message(), HasSubstr("of '" + (folder_ / "a") + "' failed: the file ends too early"));
    EXPECT_THAT(error.message(), HasSubstr("read of bytes "));
  }
  io->wait(within);
  const auto read_only = files_.open(folder_ / "a", OpenMode::read, GetParam().caching);
  io->write(*read_only, 0, memory.data(), 10);
  const IoTicket second = io->write(*read_only, 0, memory.data(), 100'000);
  EXPECT_THROW(io->drain(), IoError);
  EXPECT_THROW(io->wait(second), LogicError) << "drain has spent it";
  io->drain();
  io->wait(io->read(*file, 0, memory.data(), 50'000));
}

TEST_P(BlockIoTest, Misuse) {
  const auto io = make_block_io(options_);
  const auto file = files_.open(folder_ / "a", OpenMode::create_new, GetParam().caching);
  char byte = 0;
  const IoTicket ticket = io->write(*file, 0, &byte, 1);
  io->wait(ticket);
  EXPECT_TRUE(io->done(ticket));
  try {
    io->wait(ticket);
    FAIL();
  } catch (const LogicError& error) {
    EXPECT_THAT(error.message(), HasSubstr("ticket 1, which was waited for before"));
  }
  try {
    io->wait({99});
    FAIL();
  } catch (const LogicError& error) {
    EXPECT_THAT(error.message(), HasSubstr("which was never submitted"));
  }
  EXPECT_THROW(io->read(*file, -1, &byte, 1), InvalidArgument);
  EXPECT_THROW(io->read(*file, 0, &byte, -1), InvalidArgument);
  EXPECT_THROW(io->read(*file, 0, nullptr, 1), InvalidArgument);
  io->wait(io->read(*file, 0, nullptr, 0));
}

// Slow blocks, and an engine that is destroyed: blocks that have not begun are dropped, the others are waited
// for.
TEST_P(BlockIoTest, CancelAndDestruction) {
  FaultyFileSystem slow(files_);
  slow.inject({.operation = FileOperation::write, .times = -1, .delay = std::chrono::milliseconds(100)});
  const auto file = slow.open(folder_ / "a", OpenMode::create_new, GetParam().caching);
  const auto plain = files_.open(folder_ / "b", OpenMode::create_new, GetParam().caching);
  constexpr std::int64_t blocks = 400;  // so many take far longer than this thread can be kept from its core
  auto memory = std::make_unique<std::vector<std::byte>>(16384 * blocks);
  auto io = make_block_io(options_);
  const IoTicket ticket = io->write(*file, 0, memory->data(), 16384 * blocks);
  io->cancel();
  EXPECT_TRUE(io->done(ticket));
  const std::int64_t written = slow.count(FileOperation::write);
  EXPECT_LT(written, blocks);
  try {
    io->wait(ticket);
    FAIL();
  } catch (const IoError& error) {
    EXPECT_EQ(error.code(), ECANCELED);
    EXPECT_THAT(error.message(), HasSubstr("it was called off before it had run"));
  }
  io->wait(io->write(*file, 0, memory->data(), 100));  // works after a cancellation
  for (int i = 0; i < 10; ++i) {
    io->write(*file, 0, memory->data(), 16384 * 40);
    io->write(*plain, 0, memory->data(), 16384 * 40);
  }
  io.reset();
  memory.reset();  // AddressSanitizer would report a write that is still running
  EXPECT_LT(slow.count(FileOperation::write) - written, blocks);
}

// Every engine transfers files of a test's file system block by block, and reports their errors.
TEST_P(BlockIoTest, InterposedFiles) {
  FaultyFileSystem faulty(files_);
  const auto file = faulty.open(folder_ / "a", OpenMode::create_new, GetParam().caching);
  faulty.inject({.operation = FileOperation::write, .nth = 3, .code = EIO, .done_bytes = 10});
  faulty.inject({.operation = FileOperation::read, .nth = 1, .code = EIO});
  const auto io = make_block_io(options_);
  std::vector<std::byte> memory(16384 * 3);
  try {
    io->wait(io->write(*file, 0, memory.data(), 16384 * 3));
    FAIL();
  } catch (const IoError& error) {
    EXPECT_EQ(error.code(), EIO);
    EXPECT_THAT(error.message(), ::testing::ContainsRegex("write of bytes [0-9]+ to [0-9]+ .16374 B. of '"));
  }
  EXPECT_EQ(faulty.count(FileOperation::write), 3);
  EXPECT_THROW(io->wait(io->read(*file, 0, memory.data(), 10)), IoError);
  io->wait(io->read(*file, 0, memory.data(), 10));
}

TEST_P(BlockIoTest, AFailedTransferIsNotGoneOnWith) {
  FaultyFileSystem faulty(files_);
  const auto file = faulty.open(folder_ / "a", OpenMode::create_new, GetParam().caching);
  faulty.inject({.operation = FileOperation::write, .code = EIO});
  faulty.inject(
      {.operation = FileOperation::write, .nth = 2, .times = -1, .delay = std::chrono::milliseconds(100)});
  const auto io = make_block_io(options_);
  constexpr std::int64_t blocks = 600;
  const std::vector<std::byte> memory(16384 * blocks);
  EXPECT_THROW(io->wait(io->write(*file, 0, memory.data(), 16384 * blocks)), IoError);
  EXPECT_LT(faulty.count(FileOperation::write), blocks);
}

// Outcomes that the kernel may give to io_uring's operations.
class UringTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (TRANCHE_HAS_URING == 0) GTEST_SKIP() << "no liburing";
    options_.engine = BlockIoEngine::uring;
    options_.block_bytes = 16384;
    options_.depth = 3;
  }
  BlockIoOptions options_;
  TestFolder folder_;
};

TEST_F(UringTest, ShortAndInterruptedOperationsAreResumed) {
  std::atomic<int> calls{0};
  options_.hook = [&](IoCall call, std::int64_t bytes) -> std::int64_t {
    if (call != IoCall::read && call != IoCall::write) return bytes;
    const int number = ++calls;
    if (number % 5 == 1) return -EINTR;
    if (number % 5 == 2) return -EAGAIN;
    if (number % 5 == 3 && bytes > 8192) return bytes / 2 / 4096 * 4096;  // whole blocks
    return number % 2 == 0 ? (bytes + 2) / 3 : bytes;                     // at any byte
  };
  const auto io = make_block_io(options_);
  const auto host = make_host_resource(Tier::host);
  AlignedBuffer memory(*host, 100'000, Category::workspace, "test");
  auto* bytes = static_cast<std::byte*>(memory.data());
  const auto registration = io->register_memory(memory.data(), 100'000);
  for (const Caching caching : {Caching::buffered, Caching::direct}) {
    const auto file = posix_file_system().open(folder_ / "a", OpenMode::create_or_truncate, caching);
    const auto data = pattern(100'000, 1);
    std::copy(data.begin(), data.end(), bytes);
    io->wait(io->write(*file, 1, bytes, 100'000));
    std::memset(bytes, 0, data.size());
    io->wait(io->read(*file, 1, bytes, 100'000));
    EXPECT_EQ(std::memcmp(bytes, data.data(), data.size()), 0);
    EXPECT_EQ(file->size(), 100'001);
  }
  EXPECT_GT(io->statistics().resumed, 20);
}

TEST_F(UringTest, FailedOperations) {
  int code = EIO;
  options_.hook = [&](IoCall call, std::int64_t bytes) -> std::int64_t {
    return call == IoCall::write ? -code : bytes;
  };
  const auto file = posix_file_system().open(folder_ / "a", OpenMode::create_new, Caching::direct);
  const std::vector<std::byte> memory(50'000);
  for (const auto& [injected, text] : std::vector<std::pair<int, std::string>>{{EIO, "Input/output error"},
                                                                               {ENOSPC, "B are needed"},
                                                                               {EROFS, "read-only"},
                                                                               {0, "Input/output error"}}) {
    code = injected;
    const auto io = make_block_io(options_);
    try {
      io->wait(io->write(*file, 0, memory.data(), 50'000));
      ADD_FAILURE();
    } catch (const IoError& error) {
      EXPECT_THAT(error.message(), HasSubstr(text));
      EXPECT_THAT(error.message(), HasSubstr("write of bytes 0 to 16383 (16384 B) of '" + (folder_ / "a")));
    }
  }
}

TEST_F(UringTest, RefusedByTheKernel) {
  for (const int code : {EPERM, ENOSYS, ENOMEM}) {
    options_.hook = [&](IoCall call, std::int64_t bytes) -> std::int64_t {
      return call == IoCall::uring_setup ? -code : bytes;
    };
    options_.engine = BlockIoEngine::uring;
    try {
      make_block_io(options_);
      ADD_FAILURE();
    } catch (const IoError& error) {
      EXPECT_EQ(error.code(), code);
      EXPECT_THAT(error.message(), HasSubstr("io_uring is refused by the kernel ("));
      EXPECT_THAT(error.message(), HasSubstr(code == ENOMEM ? "ulimit -l" : "seccomp profile"));
      EXPECT_THAT(error.message(), HasSubstr("the engine 'threads' works without it"));
    }
    options_.engine = BlockIoEngine::automatic;
    const auto io = make_block_io(options_);
    EXPECT_EQ(io->engine(), BlockIoEngine::threads);
    EXPECT_THAT(io->fallback_reason(), HasSubstr("io_uring is refused by the kernel"));
  }
}

TEST_F(UringTest, RegistrationMayBeRefused) {
  options_.hook = [&](IoCall call, std::int64_t bytes) -> std::int64_t {
    return call == IoCall::uring_register ? -ENOMEM : bytes;
  };
  const auto io = make_block_io(options_);
  std::vector<std::byte> memory(10'000, std::byte{7});
  const auto registration = io->register_memory(memory.data(), 10'000);
  EXPECT_FALSE(registration->registered());
  EXPECT_THAT(registration->refusal(), HasSubstr("raise 'ulimit -l'"));
  const auto file = posix_file_system().open(folder_ / "a", OpenMode::create_new, Caching::direct);
  io->wait(io->write(*file, 0, memory.data(), 10'000));
  EXPECT_EQ(io->statistics().registered_bytes, 0);
}

// Two transfers that are submitted together must run at the same time, even if one idle thread exists for the
// first and has not woken up when the second is submitted.
TEST(ThreadBlockIo, TransfersDoNotQueueBehindAThreadThatIsWaking) {
  const TestFolder folder;
  std::vector<std::byte> memory(8192);
  for (int round = 0; round < 20; ++round) {
    std::mutex mutex;
    std::condition_variable changed;
    int under_way = 0, alone = 0;
    WatchedFileSystem files([&](FileOperation operation, std::int64_t) {
      if (operation != FileOperation::read) return;
      std::unique_lock lock(mutex);
      ++under_way;
      changed.notify_all();
      alone += !changed.wait_for(lock, std::chrono::minutes(1), [&] { return under_way >= 2; });
    });
    const auto io = make_block_io({.engine = BlockIoEngine::threads, .depth = 2, .hook = {}});
    const auto file = files.open(folder / "a", OpenMode::create_or_truncate, Caching::buffered);
    io->wait(io->write(*file, 0, memory.data(), 8192));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // for the thread to become idle
    const IoTicket first = io->read(*file, 0, memory.data(), 4096);
    const IoTicket second = io->read(*file, 4096, memory.data() + 4096, 4096);
    io->wait(first);
    io->wait(second);
    ASSERT_EQ(alone, 0) << "round " << round;
  }
}

TEST(BlockIoOptionsTest, AreChecked) {
  for (const auto& [block, depth, text] : std::vector<std::tuple<std::int64_t, int, std::string>>{
           {1, 16, "block_bytes is 1: it must be from 4096"},
           {1 << 20, 0, "depth is 0: it must be from 1 to 1024"},
           {1 << 20, 1025, "depth is 1025"},
           {std::int64_t{1} << 31, 1, "block_bytes is 2147483648"}}) {
    try {
      make_block_io({.engine = BlockIoEngine::threads, .block_bytes = block, .depth = depth, .hook = {}});
      ADD_FAILURE() << text;
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.message(), HasSubstr(text));
    }
  }
}

TEST(BlockIoOptionsTest, EnginesThatAreNotBuilt) {
  if (TRANCHE_HAS_URING != 0) GTEST_SKIP() << "this build has liburing";
  try {
    make_block_io({.engine = BlockIoEngine::uring, .hook = {}});
    FAIL();
  } catch (const NotCompiled& error) {
    EXPECT_THAT(error.message(),
                HasSubstr("io_uring is not part of this build; configure with -DTRANCHE_URING=ON"));
  }
  const auto io = make_block_io({});
  EXPECT_EQ(io->engine(), BlockIoEngine::threads);
  EXPECT_THAT(io->fallback_reason(), HasSubstr("-DTRANCHE_URING=ON"));
}

INSTANTIATE_TEST_SUITE_P(Engines, BlockIoTest,
                         ::testing::Values(Case{BlockIoEngine::threads, Caching::buffered},
                                           Case{BlockIoEngine::threads, Caching::direct},
                                           Case{BlockIoEngine::uring, Caching::buffered},
                                           Case{BlockIoEngine::uring, Caching::direct}),
                         [](const auto& info) {
                           return std::string(info.param.engine == BlockIoEngine::uring ? "Uring"
                                                                                        : "Threads") +
                                  (info.param.caching == Caching::direct ? "Direct" : "Buffered");
                         });

}  // namespace
}  // namespace tranche
