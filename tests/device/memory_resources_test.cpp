#include "tranche/device/memory_resources.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/core/error_text.h"
#include "tranche/core/error.h"

namespace tranche {
namespace {

using test::message_of;
using ::testing::HasSubstr;
using ::testing::Not;

bool aligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % static_cast<std::uintptr_t>(memory_alignment) == 0;
}

TEST(Names, OfTiersAndCategories) {
  EXPECT_EQ(name_of(Tier::device), "device");
  EXPECT_EQ(name_of(Tier::host), "host");
  EXPECT_EQ(name_of(Tier::nvme), "nvme");
  std::set<std::string_view> names;
  for (const Category category : all_categories) names.insert(name_of(category));
  EXPECT_EQ(names.size(), static_cast<std::size_t>(category_count));
  EXPECT_EQ(names.count("unknown"), 0u);
}

TEST(HostResource, GivesAlignedWritableMemoryOfEverySize) {
  auto memory = make_host_resource(Tier::host);
  EXPECT_EQ(memory->tier(), Tier::host);
  constexpr std::int64_t mebibyte = 1 << 20;
  for (const std::int64_t bytes :
       {std::int64_t{0}, std::int64_t{1}, std::int64_t{255}, std::int64_t{256}, std::int64_t{257},
        mebibyte - 1, mebibyte, mebibyte + 1, 2 * mebibyte - 1, 2 * mebibyte, 5 * mebibyte + 13}) {
    Buffer first(*memory, bytes, Category::other, "first");
    Buffer second(*memory, bytes, Category::other, "second");
    EXPECT_NE(first.data(), nullptr);
    EXPECT_NE(first.data(), second.data());
    EXPECT_TRUE(aligned(first.data())) << bytes;
    EXPECT_TRUE(aligned(second.data())) << bytes;
    std::memset(first.data(), 1, static_cast<std::size_t>(bytes));
    std::memset(second.data(), 2, static_cast<std::size_t>(bytes));
    if (bytes > 0) {
      EXPECT_EQ(static_cast<char*>(first.data())[bytes - 1], 1);
    }
  }
}

TEST(HostResource, SaysWhatWasRefused) {
  auto memory = make_host_resource(Tier::host);
  for (const std::int64_t bytes : {std::int64_t{1} << 58, std::numeric_limits<std::int64_t>::max()}) {
    const std::string text = message_of<OutOfMemory>([&] {
      memory->allocate({bytes, Category::optimizer, "h.3 exp_avg"});
    });
    EXPECT_THAT(text, HasSubstr("'h.3 exp_avg' (optimizer)"));
    EXPECT_THAT(text, HasSubstr(std::to_string(bytes) + " B) of host memory"));
    EXPECT_THAT(text, HasSubstr("Cannot allocate memory"));
  }
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                memory->allocate({-5, Category::other, "odd"});
              }),
              HasSubstr("'odd' asks for -5 bytes"));
}

TEST(MetaResource, NeverFailsAndNeverRepeats) {
  auto memory = make_meta_resource(Tier::device);
  std::set<void*> seen;
  for (const std::int64_t bytes :
       {std::int64_t{0}, std::int64_t{0}, std::int64_t{1}, std::int64_t{1} << 50}) {
    void* pointer = memory->allocate({bytes, Category::other, "meta"});
    EXPECT_NE(pointer, nullptr);
    EXPECT_TRUE(aligned(pointer));
    EXPECT_TRUE(seen.insert(pointer).second);
    memory->deallocate(pointer, {bytes, Category::other, "meta"});
  }
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                memory->allocate({-1, Category::other, "odd"});
              }),
              HasSubstr("-1 bytes"));
}

TEST(Buffer, OwnsOnce) {
  auto upstream = make_host_resource(Tier::device);
  Ledger ledger;
  TrackingResource memory(*upstream, ledger);
  Buffer empty;
  EXPECT_FALSE(empty);
  Buffer a(memory, 300, Category::parameters, "a");
  Buffer b = std::move(a);
  EXPECT_FALSE(a);  // NOLINT(bugprone-use-after-move): moved from is empty
  EXPECT_EQ(b.bytes(), 300);
  EXPECT_EQ(b.category(), Category::parameters);
  EXPECT_EQ(memory.live(), 1);
  b = Buffer(memory, 10, Category::other, "c");
  EXPECT_EQ(memory.live(), 1);
  b.reset();
  b.reset();
  EXPECT_EQ(memory.live(), 0);
  EXPECT_EQ(memory.mismatches(), 0);
}

TEST(LimitResource, RefusesBeforeUpstreamAndShowsTheLedger) {
  auto upstream = make_host_resource(Tier::device);
  Ledger ledger;
  TrackingResource tracked(*upstream, ledger);
  LimitResource memory(tracked, 1024, &ledger);
  Buffer held(memory, 700, Category::parameters, "h.0");
  const std::string text = message_of<OutOfMemory>([&] {
    memory.allocate({300, Category::gradients, "h.1 gradient"});
  });
  EXPECT_THAT(text, HasSubstr("'h.1 gradient' (gradients) asks for 300 B (300 B) of device memory"));
  EXPECT_THAT(text, HasSubstr("the limit is 1.00 KiB (1024 B)"));
  EXPECT_THAT(text, HasSubstr("768 B (768 B) are held and only 256 B are left"));
  EXPECT_THAT(text, HasSubstr("parameters"));
  EXPECT_THAT(text, HasSubstr("at peak"));
  EXPECT_EQ(tracked.calls(), 1) << "upstream must not be asked";
  // The error names the requester if the ledger knows it: a phase, or a phase and a unit.
  for (const std::string unit : {"", "h.1"}) {
    ledger.set_phase("backward", unit);
    EXPECT_THAT(message_of<OutOfMemory>([&] {
                  memory.allocate({300, Category::gradients, "h.1 gradient"});
                }),
                HasSubstr(unit.empty() ? "backward: 'h.1 gradient'" : "backward of h.1: 'h.1 gradient'"));
  }
  Buffer fits(memory, 256, Category::gradients, "exactly");
  fits.reset();
  held.reset();
  Buffer all(memory, 1024, Category::other, "all");
  all.reset();
  EXPECT_THAT(message_of<OutOfMemory>([&] {
                memory.allocate({std::numeric_limits<std::int64_t>::max(), Category::other, "endless"});
              }),
              HasSubstr("'endless'"));
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                memory.allocate({-1, Category::other, "odd"});
              }),
              HasSubstr("-1 bytes"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { LimitResource(tracked, -1, nullptr); }),
              HasSubstr("-1 bytes"));
  LimitResource bare(tracked, 0, nullptr);
  EXPECT_THAT(message_of<OutOfMemory>([&] {
                bare.allocate({1, Category::other, "one"});
              }),
              Not(HasSubstr("at peak")));
}

TEST(LimitResource, GivesBackWhatUpstreamRefused) {
  auto upstream = make_host_resource(Tier::device);
  LimitResource inner(*upstream, 256, nullptr);
  LimitResource outer(inner, 4096, nullptr);
  for (int i = 0; i < 50; ++i) {
    EXPECT_THROW(outer.allocate({1024, Category::other, "refused inside"}), OutOfMemory);
  }
  Buffer still_fits(outer, 256, Category::other, "fits");
}

TEST(TrackingResource, ComplainsAboutFreesThatDoNotMatch) {
  auto upstream = make_host_resource(Tier::device);
  Ledger ledger;
  std::vector<std::string> complaints;
  {
    TrackingResource memory(*upstream, ledger, [&](const std::string& text) { complaints.push_back(text); });
    void* pointer = memory.allocate({300, Category::gathered, "unit"});
    int stranger = 0;
    memory.deallocate(&stranger, {300, Category::gathered, "stranger"});
    ASSERT_EQ(complaints.size(), 1u);
    EXPECT_THAT(complaints[0], HasSubstr("'stranger'"));
    EXPECT_THAT(complaints[0], HasSubstr("nothing live has that address"));
    EXPECT_EQ(ledger.account(Tier::device).current.total(), 512);
    memory.deallocate(pointer, {301, Category::gathered, "unit"});
    ASSERT_EQ(complaints.size(), 2u);
    EXPECT_THAT(complaints[1], HasSubstr("it was allocated as 'unit' (gathered, 300 B)"));
    EXPECT_EQ(ledger.account(Tier::device).current.total(), 0);
    EXPECT_EQ(memory.mismatches(), 2);
    EXPECT_EQ(memory.calls(), 3);
    pointer = memory.allocate({100, Category::other, "leaked"});
    upstream->deallocate(pointer, {100, Category::other, "leaked"});
  }
  ASSERT_EQ(complaints.size(), 3u);
  EXPECT_THAT(complaints[2],
              HasSubstr("1 allocations of device memory were never freed: 'leaked' (other, 100 B)"));
}

TEST(TrackingResource, FreesByAddressAlone) {
  auto upstream = make_host_resource(Tier::host);
  Ledger ledger;
  std::vector<std::string> complaints;
  TrackingResource memory(*upstream, ledger, [&](const std::string& text) { complaints.push_back(text); });
  void* first = memory.allocate({1000, Category::activations, "torch"});
  void* second = memory.allocate({300, Category::activations, "torch"});
  memory.free(nullptr);
  memory.free(first);
  EXPECT_EQ(memory.live(), 1);
  EXPECT_EQ(ledger.account(Tier::host).current.total(), 512);
  EXPECT_TRUE(complaints.empty());
  memory.free(second);
  memory.free(second);
  EXPECT_EQ(ledger.account(Tier::host).current.total(), 0);
  EXPECT_EQ(memory.mismatches(), 1);
  ASSERT_EQ(complaints.size(), 1u);
  EXPECT_THAT(complaints[0], AllOf(HasSubstr("free of 0x"), HasSubstr("of host memory does not match"),
                                   HasSubstr("nothing live has that address")));
}

TEST(StatisticsResource, FoldsScopesIntoTheirParent) {
  auto upstream = make_host_resource(Tier::device);
  StatisticsResource memory(*upstream);
  Buffer outer(memory, 1024, Category::other, "outer");
  memory.push();
  {
    Buffer inner(memory, 2048, Category::other, "inner");
    EXPECT_EQ(memory.bytes().current, 2048);
  }
  Buffer kept(memory, 256, Category::other, "kept");
  EXPECT_EQ(memory.allocations().total, 2);
  const StatisticsResource::Counter scope = memory.pop();
  EXPECT_EQ(scope.peak, 2048);
  EXPECT_EQ(scope.current, 256);
  EXPECT_EQ(scope.total, 2304);
  EXPECT_EQ(memory.bytes().peak, 3072);
  EXPECT_EQ(memory.bytes().current, 1280);
  EXPECT_EQ(memory.bytes().total, 3328);
  EXPECT_EQ(memory.allocations().current, 2);
  EXPECT_THAT(message_of<LogicError>([&] { memory.pop(); }), HasSubstr("none is open"));
}

TEST(LoggingResource, WritesOneLineACall) {
  auto upstream = make_host_resource(Tier::device);
  LimitResource limited(*upstream, 256, nullptr);
  std::vector<std::string> lines;
  LoggingResource memory(limited, [&](const std::string& line) { lines.push_back(line); });
  { Buffer buffer(memory, 100, Category::workspace, "a \"quoted\", tag"); }
  EXPECT_THROW(memory.allocate({1000, Category::workspace, "refused"}), OutOfMemory);
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_THAT(lines[0], HasSubstr(",allocate,device,workspace,\"a \"\"quoted\"\", tag\",100,0x"));
  EXPECT_THAT(lines[1], HasSubstr(",deallocate,device,workspace,"));
  EXPECT_THAT(lines[2], HasSubstr(",allocate failed,device,workspace,refused,1000,0x0"));
}

TEST(PoisonResource, FillsWhenHandedOutAndWhenFreed) {
  // An upstream resource that keeps the memory, so that its contents after the free can be read.
  struct Keeper : MemoryResource {
    alignas(memory_alignment) unsigned char bytes[512] = {};
    Tier tier() const override { return Tier::device; }
    void* allocate(const AllocationRequest&) override { return bytes; }
    void deallocate(void*, const AllocationRequest&) noexcept override {}
  } keeper;
  PoisonResource memory(keeper);
  {
    Buffer buffer(memory, 300, Category::other, "poisoned");
    EXPECT_EQ(keeper.bytes[0], 0xff);
    EXPECT_EQ(keeper.bytes[299], 0xff);
    EXPECT_EQ(keeper.bytes[300], 0);
    std::memset(buffer.data(), 5, 300);
  }
  EXPECT_EQ(keeper.bytes[0], 0xff);
  EXPECT_EQ(keeper.bytes[299], 0xff);
}

TEST(Decorators, AreThreadSafe) {
  auto upstream = make_host_resource(Tier::device);
  Ledger ledger;
  TrackingResource tracked(*upstream, ledger);
  StatisticsResource counted(tracked);
  LimitResource memory(counted, 1 << 20, &ledger);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&memory, t] {
      for (int i = 0; i < 100; ++i) Buffer buffer(memory, 100 * t + i, Category::workspace, "thread");
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(tracked.live(), 0);
  EXPECT_EQ(tracked.mismatches(), 0);
  EXPECT_EQ(counted.bytes().current, 0);
  EXPECT_EQ(counted.allocations().total, 400);
  Buffer all(memory, 1 << 20, Category::workspace, "the whole limit is free again");
}

}  // namespace
}  // namespace tranche
