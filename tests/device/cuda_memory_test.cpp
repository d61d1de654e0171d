#include <unistd.h>

#include <chrono>
#include <random>
#include <thread>

#include "tests/device/cuda_support.h"
#include "tranche/device/ledger.h"
#include "tranche/device/memory_resources.h"
#include "tranche/device/step_arena.h"

namespace tranche {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing_support::message_of;

class CudaMemory : public testing_support::CudaTest {};

std::uintptr_t address(const Buffer& buffer) {
  return reinterpret_cast<std::uintptr_t>(buffer.data());
}

TEST_F(CudaMemory, IsAlignedDistinctAndUsable) {
  for (const Tier tier : {Tier::device, Tier::host}) {
    std::vector<Buffer> buffers;
    std::int64_t total = 0;
    for (const std::int64_t size :
         {0, 1, 255, 256, 257, 4096, 65536, 65537, 100003, (2 << 20) - 1, (2 << 20) + 1}) {
      buffers.push_back(memory(size, tier));
      EXPECT_EQ(address(buffers.back()) % 256, 0u) << size;
      total += size;
    }
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        const auto low = std::min(address(buffers[i]), address(buffers[j]));
        const auto high = std::max(address(buffers[i]), address(buffers[j]));
        const Buffer& first = low == address(buffers[i]) ? buffers[i] : buffers[j];
        EXPECT_GE(high - low, static_cast<std::uintptr_t>(std::max<std::int64_t>(1, first.bytes())));
      }
    }
    if (tier == Tier::host) {
      for (const Buffer& buffer : buffers)
        std::memset(buffer.data(), 1, static_cast<std::size_t>(buffer.bytes()));
      EXPECT_GE(device().memory_info().pinned, total);
      continue;
    }
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      device().fill_bytes(compute(), buffers[i].data(), static_cast<unsigned char>(i + 1),
                          buffers[i].bytes());
    }
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      const auto all = read(buffers[i].data(), buffers[i].bytes());
      EXPECT_EQ(all, std::vector<unsigned char>(all.size(), static_cast<unsigned char>(i + 1)));
    }
  }
}

TEST_F(CudaMemory, FreedMemoryIsUsedAgainAndGoesWhenToldTo) {
  Buffer a = memory(3 << 20);
  Buffer keep = memory(1 << 20);
  const auto place = address(a);
  const std::int64_t mapped = device().memory_info().mapped;
  a.reset();
  EXPECT_EQ(device().memory_info().mapped, mapped) << "freeing calls no driver";
  Buffer b = memory(1 << 20);
  Buffer c = memory(2 << 20);
  EXPECT_EQ(address(b), place);
  EXPECT_EQ(address(c), place + (1 << 20));
  EXPECT_EQ(device().memory_info().mapped, mapped);
  b.reset();
  c.reset();
  Buffer d = memory(3 << 20);
  EXPECT_EQ(address(d), place) << "neighbours that are free are one place";
  d.reset();
  keep.reset();
  device().release_unused();
  EXPECT_EQ(device().memory_info().mapped, 0);
}

TEST_F(CudaMemory, CommunicationBuffersAreOfOnePiece) {
  Buffer small = memory(100);
  const std::int64_t mapped = device().memory_info().mapped;
  Buffer slab(device().memory(Tier::device), 300, Category::communication, "slab");
  EXPECT_EQ(device().memory_info().mapped, 2 * mapped) << "pages of its own";
}

TEST_F(CudaMemory, OutOfMemorySaysWhatIsFree) {
  const MemoryInfo info = device().memory_info();
  const std::string text = message_of<OutOfMemory>(
      [&] { Buffer(device().memory(Tier::device), info.total + 1, Category::activations, "h.3 scores"); });
  EXPECT_THAT(text, AllOf(HasSubstr("'h.3 scores' (activations) asks for"), HasSubstr("of device memory"),
                          HasSubstr(std::to_string(info.total + 1)), HasSubstr("the GPU has"),
                          HasSubstr("are free"), HasSubstr("use a smaller micro-batch")));
  EXPECT_EQ(device().memory_info().mapped, info.mapped) << "nothing is left behind";
  EXPECT_THAT(message_of<OutOfMemory>([&] {
                Buffer(device().memory(Tier::device), std::int64_t{1} << 62, Category::other, "too much");
              }),
              HasSubstr("'too much'"));
  EXPECT_THAT(message_of<InvalidArgument>(
                  [&] { Buffer(device().memory(Tier::device), -1, Category::other, "negative"); }),
              HasSubstr("'negative' asks for -1 bytes"));
  EXPECT_THAT(message_of<InvalidArgument>(
                  [&] { Buffer(device().memory(Tier::host), -1, Category::other, "negative"); }),
              HasSubstr("'negative' asks for -1 bytes"));
  Buffer after = memory(1000);
  EXPECT_EQ(read(after.data(), 1000).size(), 1000u) << "and the device goes on";
}

TEST_F(CudaMemory, OutOfPinnedMemoryIsOfTheHostTier) {
  const std::string text = message_of<OutOfMemory>([&] {
    Buffer(device().memory(Tier::host), std::int64_t{1} << 50, Category::optimizer, "master weights");
  });
  EXPECT_THAT(text, AllOf(HasSubstr("'master weights' (optimizer)"), HasSubstr("of host memory"),
                          HasSubstr("could not be had or pinned"), HasSubstr("this rank has pinned")));
  EXPECT_THAT(message_of<OutOfMemory>([&] {
                Buffer(device().memory(Tier::host), std::int64_t{1} << 62, Category::other, "too much");
              }),
              HasSubstr("'too much'"));
}

TEST_F(CudaMemory, PinnedMemoryIsPinnedInExactSizes) {
  const std::int64_t before = device().memory_info().pinned;
  const std::int64_t page = sysconf(_SC_PAGESIZE);
  {
    Buffer exact = memory(80 * page + 1, Tier::host);
    EXPECT_EQ(device().memory_info().pinned - before, 81 * page) << "no more than the last page";
  }
  EXPECT_EQ(device().memory_info().pinned, before) << "and no longer than it is held";
  Buffer small = memory(100, Tier::host);
  const std::int64_t slab = device().memory_info().pinned;
  Buffer next = memory(2000, Tier::host);
  EXPECT_EQ(device().memory_info().pinned, slab) << "small ones share";
  Buffer large = memory(2 << 20, Tier::host);
  EXPECT_EQ(address(large) % (2 << 20), 0u) << "large ones are made for huge pages";
}

TEST_F(CudaMemory, TheLedgerAgreesWithTheDevice) {
  Ledger ledger;
  TrackingResource tracked(device().memory(Tier::device), ledger);
  std::mt19937 draw(7);
  std::vector<Buffer> live;
  for (int step = 0; step < 200; ++step) {
    if (!live.empty() && draw() % 2 == 0) {
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(draw() % live.size()));
    } else {
      live.emplace_back(tracked, 1 + draw() % (300 << 10), Category::activations, "piece");
    }
    ASSERT_EQ(ledger.account(Tier::device).current.total(), device().memory_info().placed) << "step " << step;
  }
  live.clear();
  device().release_unused();
  EXPECT_EQ(device().memory_info().mapped, 0);
  EXPECT_EQ(tracked.mismatches(), 0);
}

TEST_F(CudaMemory, PoisonReachesMemoryTheHostCannot) {
  PoisonResource poisoned(device().memory(Tier::device), make_poison_fill(device()));
  const void* place = nullptr;
  Buffer beside = memory(64);  // keeps the page
  {
    Buffer a(poisoned, 1000, Category::other, "poisoned");
    EXPECT_EQ(read(a.data(), 1000), std::vector<unsigned char>(1000, 0xff)) << "when handed out";
    device().fill_bytes(compute(), a.data(), 1, 1000);
    compute().synchronize();
    place = a.data();
  }
  Buffer again = memory(1000);
  ASSERT_EQ(again.data(), place);
  EXPECT_EQ(read(again.data(), 1000), std::vector<unsigned char>(1000, 0xff)) << "and when freed";
}

TEST_F(CudaMemory, TheArenaPoisonsAfterTheWorkThatUsesIt) {
  Ledger ledger;
  TrackingResource tracked(device().memory(Tier::device), ledger);
  StepArena arena(tracked, ledger);
  arena.poison_with(make_poison_fill(device()));
  Buffer result = memory(4096, Tier::host);
  for (int pass = 0; pass < 3; ++pass) {
    arena.begin("train", pass == 0);
    StepBuffer slot = arena.acquire(4096, Category::activations, "slot");
    for (const Event& event : slot.ready()) compute().wait(event);
    EXPECT_EQ(read(slot.data(), 4096), std::vector<unsigned char>(4096, 0xff)) << pass;
    device().fill_bytes(compute(), slot.data(), 4, 4096);
    compute().enqueue("pause", [] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); });
    device().copy_to_host(compute(), result.data(), slot.data(), 4096);
    const void* place = slot.data();
    slot.release(compute().record());  // while the copy has not yet run
    compute().synchronize();
    const auto* bytes = static_cast<const unsigned char*>(result.data());
    EXPECT_EQ(std::vector<unsigned char>(bytes, bytes + 4096), std::vector<unsigned char>(4096, 4)) << pass;
    if (pass > 0) {
      EXPECT_EQ(read(place, 4096), std::vector<unsigned char>(4096, 0xff)) << pass;
    }
    arena.end();
  }
  EXPECT_TRUE(arena.planned("train"));
}

}  // namespace
}  // namespace tranche
