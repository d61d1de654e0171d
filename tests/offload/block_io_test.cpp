// Both engines of block_io.h: any range, any memory, any number of threads, and what happens when the kernel
// does less than it was asked.
#include "tranche/offload/block_io.h"

#include <gmock/gmock.h>

#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "tranche/core/error.h"
#include "tranche/device/memory_resources.h"
#include "tranche/offload/aligned_buffer.h"
#include "tranche/tests/offload/test_folder.h"

namespace tranche {
namespace {

using ::testing::HasSubstr;
using testing::TestFolder;

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
  TestFolder folder_{TRANCHE_TEST_FOLDER};
  FileSystem& files_ = posix_file_system();
};

std::vector<std::byte> pattern(std::size_t bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> result(bytes);
  for (auto& byte : result) byte = static_cast<std::byte>(random());
  return result;
}

// Ranges that begin and end anywhere, in memory that begins anywhere, against a plain array.
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
  for (int round = 0; round < 60; ++round) {
    // Disjoint ranges, written at once, in an order of their own.
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
      std::memcpy(expected.data() + cuts[i], data.data() + cuts[i], static_cast<std::size_t>(bytes));
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
