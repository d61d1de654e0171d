#include "tranche/device/step_arena.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/core/error_text.h"
#include "tranche/core/error.h"
#include "tranche/device/device.h"
#include "tranche/device/memory_resources.h"

namespace tranche {
namespace {

using test::message_of;
using ::testing::HasSubstr;

/// An arena on tracked host memory, with everything that the tests inspect.
class StepArenaTest : public ::testing::Test {
 protected:
  StepBuffer take(std::int64_t bytes, std::string_view tag = "buffer",
                  Category category = Category::activations) {
    return arena_.acquire(bytes, category, tag);
  }

  // Two buffers stay and one is temporary, so the plan is kept + kept + temporary.
  std::vector<void*> plain_step() {
    std::vector<void*> addresses;
    StepBuffer first = take(1000, "first");
    addresses.push_back(first.data());
    {
      StepBuffer passing = take(2000, "passing", Category::gathered);
      addresses.push_back(passing.data());
    }
    StepBuffer second = take(500, "second");
    addresses.push_back(second.data());
    StepBuffer late = take(2000, "late", Category::gradients);
    addresses.push_back(late.data());
    return addresses;
  }

  void pass(std::string_view program, bool record, const std::function<void()>& step) {
    arena_.begin(program, record);
    step();
    arena_.end();
  }

  std::unique_ptr<MemoryResource> upstream_ = make_host_resource(Tier::device);
  Ledger ledger_;
  std::vector<std::string> complaints_;
  TrackingResource memory_{*upstream_, ledger_,
                           [this](const std::string& text) { complaints_.push_back(text); }};
  StepArena arena_{memory_, ledger_};
};

TEST_F(StepArenaTest, RecordsPacksAndReplays) {
  EXPECT_FALSE(arena_.planned("train"));
  pass("train", true, [&] { plain_step(); });
  EXPECT_TRUE(arena_.planned("train"));
  EXPECT_EQ(arena_.live_peak("train"), 1024 + 512 + 2048);
  EXPECT_EQ(arena_.block_bytes(), 1024 + 512 + 2048);
  EXPECT_EQ(memory_.live(), 1) << "only the block";

  const std::int64_t calls = memory_.calls();
  std::vector<void*> first, second;
  pass("train", false, [&] { first = plain_step(); });
  pass("train", false, [&] { second = plain_step(); });
  EXPECT_EQ(first, second);
  EXPECT_EQ(memory_.calls(), calls) << "a planned pass must not call the resource";
  for (void* address : first) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(address) % static_cast<std::uintptr_t>(memory_alignment), 0u);
  }
}

TEST_F(StepArenaTest, DynamicPassesAndOutsideUseTheResource) {
  pass("generate", false, [&] { plain_step(); });
  EXPECT_FALSE(arena_.planned("generate"));
  EXPECT_EQ(arena_.block_bytes(), 0);
  EXPECT_EQ(memory_.calls(), 8);
  {
    StepBuffer outside = take(100);
    EXPECT_EQ(memory_.live(), 1);
    EXPECT_EQ(ledger_.account(Tier::device).persistent.total(), 0) << "the step's memory is not persistent";
    EXPECT_EQ(ledger_.account(Tier::device).current[Category::activations], 256);
  }
  EXPECT_EQ(memory_.live(), 0);
  EXPECT_EQ(ledger_.account(Tier::device).persistent.total(), 0);
}

TEST_F(StepArenaTest, LedgerBooksOccupancy) {
  pass("train", true, [&] { plain_step(); });
  const std::int64_t block = arena_.block_bytes();
  EXPECT_EQ(ledger_.account(Tier::device).current[Category::other], block);
  EXPECT_EQ(ledger_.account(Tier::device).peak, block) << "old memory and block must not count together";
  arena_.begin("train", false);
  StepBuffer first = take(1000);
  TierAccount account = ledger_.account(Tier::device);
  EXPECT_EQ(account.current[Category::activations], 1024);
  EXPECT_EQ(account.current[Category::other], block - 1024);
  EXPECT_EQ(account.current.total(), block);
  EXPECT_EQ(account.persistent.total(), 0);
  first.release({});
  first.release({});
  EXPECT_FALSE(first);
  account = ledger_.account(Tier::device);
  EXPECT_EQ(account.current[Category::other], block);
  arena_.end();
}

TEST_F(StepArenaTest, ReadyHoldsEventsOfEarlierOwners) {
  const auto step = [&](const Event& after, std::vector<Event>* ready) {
    StepBuffer a = take(1000, "a");
    if (ready != nullptr) *ready = a.ready();
    a.release(after);
    StepBuffer b = take(700, "b");
    if (ready != nullptr) ready->insert(ready->end(), b.ready().begin(), b.ready().end());
    b.release({});
  };
  pass("train", true, [&] { step({}, nullptr); });
  ASSERT_EQ(arena_.block_bytes(), 1024);

  auto first = std::make_shared<HostEvent>();
  std::vector<Event> ready;
  pass("train", false, [&] { step(Event(first), &ready); });  // must not block
  ASSERT_EQ(ready.size(), 1u) << "a has no earlier owner; b waits for a";
  EXPECT_EQ(ready[0].state(), first);

  auto second = std::make_shared<HostEvent>();
  pass("train", false, [&] { step(Event(second), &ready); });
  ASSERT_EQ(ready.size(), 3u) << "a waits for the last pass, b for that and for a";
  EXPECT_EQ(ready[0].state(), first);
  EXPECT_EQ(ready[1].state(), first);
  EXPECT_EQ(ready[2].state(), second);

  first->complete();
  second->complete();
  pass("train", false, [&] { step({}, &ready); });
  EXPECT_TRUE(ready.empty()) << "passed events are not handed out";
}

TEST_F(StepArenaTest, BuffersApartDoNotWaitForEachOther) {
  const auto step = [&](const Event& after) {
    StepBuffer a = take(256, "a");
    StepBuffer b = take(256, "b");
    EXPECT_TRUE(b.ready().empty());
    a.release(after);
  };
  pass("train", true, [&] { step({}); });
  auto pending = std::make_shared<HostEvent>();
  pass("train", false, [&] { step(Event(pending)); });
  pass("train", false, [&] {
    StepBuffer a = take(256, "a");
    EXPECT_EQ(a.ready().size(), 1u);
    StepBuffer b = take(256, "b");
    EXPECT_TRUE(b.ready().empty());
  });
  pending->complete();
}

TEST_F(StepArenaTest, UnplannedReleaseBlocksOnTheEvent) {
  auto event = std::make_shared<HostEvent>();
  std::atomic<bool> completed{false};
  arena_.begin("train", true);
  StepBuffer a = take(1000);
  std::thread worker([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    completed = true;
    event->complete();
  });
  a.release(Event(event));
  EXPECT_TRUE(completed);
  EXPECT_EQ(memory_.live(), 0);
  arena_.end();
  worker.join();

  auto failed = std::make_shared<HostEvent>();
  failed->fail(std::make_exception_ptr(CommunicationError("lost")));
  StepBuffer b = take(10);
  b.release(Event(failed));  // a waiter for the work receives the failure, not a later user of the memory
  EXPECT_EQ(memory_.live(), 1);
}

TEST_F(StepArenaTest, OtherRequestFallsBackAndIsPackedAtTheEnd) {
  const auto step = [&](std::int64_t bytes, Category category, int extra) {
    StepBuffer a = take(512, "a");
    StepBuffer b = take(bytes, "b", category);
    std::vector<StepBuffer> more;
    for (int i = 0; i < extra; ++i) more.push_back(take(256, "extra"));
  };
  struct Change {
    std::int64_t bytes;
    Category category;
    int extra;
  };
  Change last{300, Category::gathered, 0};
  pass("train", true, [&] { step(last.bytes, last.category, last.extra); });
  for (const Change change : {Change{301, Category::gathered, 0}, Change{301, Category::gradients, 0},
                              Change{301, Category::gradients, 2}}) {
    ASSERT_TRUE(arena_.planned("train"));
    std::int64_t calls = memory_.calls();
    const std::int64_t packings = arena_.packings();
    pass("train", false, [&] { step(change.bytes, change.category, change.extra); });
    EXPECT_GT(memory_.calls(), calls) << "the rest of the pass comes from the resource";
    EXPECT_EQ(arena_.packings(), packings + 1);
    EXPECT_TRUE(arena_.planned("train"));
    calls = memory_.calls();
    pass("train", false, [&] { step(change.bytes, change.category, change.extra); });
    EXPECT_EQ(memory_.calls(), calls);
  }
  EXPECT_EQ(arena_.block_bytes(), 512 + 512 + 2 * 256)
      << "of plans that nobody follows any more nothing stays";
  // Fewer acquires than recorded are allowed.
  pass("train", false, [&] { StepBuffer a = take(512, "a"); });
  EXPECT_TRUE(arena_.planned("train"));
}

/// A step whose requests grow with both extents, at different rates.
class StepArenaShapes : public StepArenaTest {
 protected:
  void shaped(const std::vector<Shape>& micro_batches, bool record = false, int kind = 0) {
    arena_.begin("train", record, micro_batches.front());
    for (std::size_t m = 0; m < micro_batches.size(); ++m) {
      if (m > 0) arena_.also(micro_batches[m]);
      const std::int64_t rows = micro_batches[m].elements();
      StepBuffer a = take(256 * rows, "a");
      { StepBuffer b = take(1024 * rows, "b", kind == 0 ? Category::gathered : Category::gradients); }
      StepBuffer c = take(512 * rows, "c");
      for (int i = 0; i < kind; ++i) take(256, "more", Category::workspace).release({});
    }
    arena_.end();
  }
  std::int64_t calls_of(const std::vector<Shape>& micro_batches, int kind = 0) {
    const std::int64_t before = memory_.calls();
    shaped(micro_batches, false, kind);
    return memory_.calls() - before;
  }
};

TEST_F(StepArenaShapes, OnePlanServesAllThatIsNoLarger) {
  shaped({{2, 4}}, true);
  EXPECT_EQ(arena_.block_bytes(), 8 * 1280);
  EXPECT_EQ(calls_of({{2, 4}}), 0);
  EXPECT_EQ(calls_of({{2, 3}}), 0) << "never seen, but no larger";
  EXPECT_EQ(calls_of({{0, 4}}), 0);
  EXPECT_EQ(arena_.packings(), 1);
  const std::int64_t peak = ledger_.account(Tier::device).peak;
  EXPECT_EQ(peak, 8 * 1280);
  EXPECT_GT(calls_of({{2, 5}}), 0);
  EXPECT_EQ(ledger_.account(Tier::device).peak, 10 * 1280) << "what is larger makes room first";
  EXPECT_EQ(arena_.block_bytes(), 10 * 1280);
  for (const Shape& seen : {Shape{2, 5}, Shape{2, 4}, Shape{1, 5}}) EXPECT_EQ(calls_of({seen}), 0);
  EXPECT_EQ(arena_.packings(), 2);
  // The value of each extent matters, and so does their number.
  EXPECT_GT(calls_of({{3, 1}}), 0);
  EXPECT_GT(calls_of({{4}}), 0);
  EXPECT_EQ(calls_of({{4}}), 0);
  EXPECT_EQ(calls_of({{2, 5}}), 0);
}

// A first request that does not grow would fit into the block, which then could not be freed before the
// others.
TEST_F(StepArenaShapes, AShapeBeyondThePlanGivesTheBlockBackBeforeItsFirstRequest) {
  const auto step = [&](const Shape& shape, bool record) {
    arena_.begin("train", record, shape);
    {
      StepBuffer same = take(256, "same");
      StepBuffer grows = take(1024 * shape.elements(), "grows");
    }
    arena_.end();
  };
  step({4}, true);
  EXPECT_EQ(ledger_.account(Tier::device).peak, 256 + 4096);
  step({5}, false);
  EXPECT_EQ(ledger_.account(Tier::device).peak, 256 + 5120);
  EXPECT_EQ(arena_.block_bytes(), 256 + 5120);
}

TEST_F(StepArenaShapes, EachMicroBatchHasItsLargest) {
  shaped({{4}, {2}}, true);
  EXPECT_EQ(arena_.block_bytes(), 4 * 1280);
  EXPECT_EQ(calls_of({{3}, {2}}), 0);
  // The second micro-batch is larger than before. No buffer is in the block, so the block is freed before
  // more memory is allocated.
  EXPECT_GT(calls_of({{3}, {9}}), 0);
  EXPECT_EQ(ledger_.account(Tier::device).peak, 9 * 1280);
  EXPECT_EQ(calls_of({{4}, {9}}), 0);
  EXPECT_GT(calls_of({{5}, {1}}), 0) << "the first has not been so large";
  EXPECT_EQ(calls_of({{5}, {9}}), 0);
}

TEST_F(StepArenaShapes, PassesOfOtherKindsHavePlansOfTheirOwn) {
  shaped({{4}}, true);
  EXPECT_GT(calls_of({{5}}, 1), 0);
  EXPECT_GT(calls_of({{6}}, 2), 0);
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(calls_of({{4}}), 0);
    EXPECT_EQ(calls_of({{5}}, 1), 0);
    EXPECT_EQ(calls_of({{6}}, 2), 0);
  }
  EXPECT_EQ(arena_.packings(), 3);
  EXPECT_EQ(arena_.dropped(), 0);
}

TEST_F(StepArenaShapes, ThePlanUnusedForLongestIsDropped) {
  shaped({{1}}, true, 1);
  for (std::int64_t length = 2; length <= static_cast<std::int64_t>(StepArena::most_shapes); ++length) {
    shaped({{length}});
  }
  EXPECT_EQ(arena_.dropped(), 0);
  EXPECT_EQ(calls_of({{1}}, 1), 0);
  EXPECT_EQ(calls_of({{5}}), 0) << "and is now the last used of all";
  for (std::int64_t length = 1000; length < 1000 + static_cast<std::int64_t>(StepArena::most_shapes);
       ++length) {
    shaped({{length}});
  }
  EXPECT_EQ(arena_.dropped(), 1) << "shapes whose plan others use are no loss";
  EXPECT_EQ(calls_of({{5}}), 0) << "never mind that it is not remembered";
  EXPECT_GT(calls_of({{1}}, 1), 0) << "the dropped one";
  EXPECT_EQ(calls_of({{1}}, 1), 0);
}

TEST_F(StepArenaShapes, WithoutShapesTheLargestRequestsCount) {
  const auto step = [&](std::int64_t bytes) {
    StepBuffer a = take(bytes, "a");
    StepBuffer b = take(2 * bytes, "b");
  };
  pass("train", true, [&] { step(1024); });
  pass("train", false, [&] { step(4096); });
  const std::int64_t calls = memory_.calls();
  for (const std::int64_t bytes : {1024, 512, 4096}) pass("train", false, [&] { step(bytes); });
  EXPECT_EQ(memory_.calls(), calls);
  EXPECT_EQ(arena_.block_bytes(), 3 * 4096);
  EXPECT_THAT(message_of<LogicError>([&] { arena_.also({1}); }), HasSubstr("also() outside a pass"));
}

// A buffer that a larger pass releases later must not share the place that a shorter recording gave it.
TEST_F(StepArenaShapes, AWidenedPlanKeepsTheLongestLife) {
  const auto step = [&](std::int64_t bytes, bool late) {
    StepBuffer a = take(bytes, "a");
    if (!late) a.release({});
    StepBuffer b = take(bytes, "b");
    std::memset(b.data(), 1, static_cast<std::size_t>(bytes));
    if (late) std::memset(a.data(), 2, static_cast<std::size_t>(bytes));
    EXPECT_EQ(static_cast<unsigned char*>(b.data())[bytes - 1], 1);
  };
  pass("train", true, [&] { step(1024, false); });
  EXPECT_EQ(arena_.block_bytes(), 1024);
  pass("train", false, [&] { step(2048, true); });
  EXPECT_EQ(arena_.block_bytes(), 4096);
  const std::int64_t calls = memory_.calls();
  pass("train", false, [&] { step(1024, false); });
  pass("train", false, [&] { step(2048, true); });
  EXPECT_EQ(memory_.calls(), calls);
}

TEST_F(StepArenaTest, OverlapWithAnUnreleasedSlotFallsBack) {
  pass("train", true, [&] {
    take(1024, "a").release({});
    take(1024, "b").release({});
  });
  ASSERT_EQ(arena_.block_bytes(), 1024);
  arena_.begin("train", false);
  StepBuffer a = take(1024, "a");
  StepBuffer b = take(1024, "b");  // recorded after a's release, so it gets the same bytes
  std::memset(a.data(), 1, 1024);
  std::memset(b.data(), 2, 1024);
  EXPECT_EQ(static_cast<unsigned char*>(a.data())[1023], 1);
  EXPECT_EQ(static_cast<unsigned char*>(a.data())[0], 1);
  EXPECT_EQ(memory_.live(), 2);
  a.release({});
  b.release({});
  arena_.end();
  EXPECT_EQ(arena_.block_bytes(), 2048) << "packed with the longer life";
}

TEST_F(StepArenaTest, OtherReleaseOrderWithoutOverlapStaysPlanned) {
  const auto step = [&](bool swapped) {
    StepBuffer a = take(1000, "a");
    StepBuffer b = take(1000, "b");
    StepBuffer& first = swapped ? b : a;
    StepBuffer& second = swapped ? a : b;
    first.release({});
    second.release({});
  };
  pass("train", true, [&] { step(false); });
  pass("train", false, [&] { step(true); });
  EXPECT_TRUE(arena_.planned("train"));
}

TEST_F(StepArenaTest, EmptyBuffersWorkEverywhere) {
  const auto step = [&] {
    StepBuffer none = take(0, "none");
    EXPECT_NE(none.data(), nullptr);
    EXPECT_EQ(none.bytes(), 0);
    EXPECT_TRUE(none);
  };
  step();
  pass("train", true, step);
  EXPECT_TRUE(arena_.planned("train"));
  pass("train", false, step);
  EXPECT_TRUE(arena_.planned("train"));
  EXPECT_EQ(memory_.calls(), 0);
  EXPECT_THAT(message_of<InvalidArgument>([&] { take(-1, "negative"); }),
              HasSubstr("'negative' of -1 bytes"));
}

TEST_F(StepArenaTest, ProgramsShareOneBlockAndItGrowsOnlyWhenNeeded) {
  pass("train", true, [&] { StepBuffer big = take(4096, "big"); });
  EXPECT_EQ(arena_.block_bytes(), 4096);
  pass("evaluate", true, [&] {
    StepBuffer small = take(1024, "small");
    EXPECT_EQ(ledger_.account(Tier::device).current.total(), 1024)
        << "the block makes room while another records";
  });
  EXPECT_EQ(arena_.block_bytes(), 4096);
  EXPECT_TRUE(arena_.planned("train"));
  EXPECT_TRUE(arena_.planned("evaluate"));
  pass("large", true, [&] { StepBuffer larger = take(8192, "larger"); });
  EXPECT_EQ(arena_.block_bytes(), 8192);
  EXPECT_EQ(ledger_.account(Tier::device).peak, 8192);
  const std::int64_t calls = memory_.calls();
  pass("train", false, [&] { StepBuffer big = take(4096, "big"); });
  pass("evaluate", false, [&] { StepBuffer small = take(1024, "small"); });
  EXPECT_EQ(memory_.calls(), calls);
}

TEST_F(StepArenaTest, AFirstPassDoesNotLieBesideTheBlockOfOtherPrograms) {
  // Validation after training must fit into the memory of training, so the block is freed before single
  // buffers are allocated.
  pass("train", true, [&] { plain_step(); });
  pass("train", false, [&] { plain_step(); });
  const std::int64_t block = arena_.block_bytes();
  const std::int64_t peak = ledger_.account(Tier::device).peak;
  pass("evaluate", false, [&] { plain_step(); });
  EXPECT_EQ(ledger_.account(Tier::device).peak, peak);
  EXPECT_EQ(arena_.block_bytes(), 0);
  pass("train", false, [&] { plain_step(); });
  EXPECT_EQ(arena_.block_bytes(), block) << "and comes back with the next planned pass";
  EXPECT_EQ(ledger_.account(Tier::device).peak, peak);
}

TEST_F(StepArenaTest, GrowingWaitsForOutstandingWork) {
  pass("train", true, [&] { StepBuffer a = take(1024, "a"); });
  auto event = std::make_shared<HostEvent>();
  std::atomic<bool> completed{false};
  pass("train", false, [&] { take(1024, "a").release(Event(event)); });
  std::thread worker([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    completed = true;
    event->complete();
  });
  pass("larger", true, [&] { StepBuffer b = take(2048, "b"); });
  EXPECT_TRUE(completed);
  worker.join();
}

TEST_F(StepArenaTest, EndNamesTheHolders) {
  arena_.begin("train", true);
  StepBuffer a = take(1000, "h.0 gathered", Category::gathered);
  std::vector<StepBuffer> many;
  for (int i = 0; i < 9; ++i) many.push_back(take(100, "x" + std::to_string(i)));
  const std::string text = message_of<LogicError>([&] { arena_.end(); });
  EXPECT_THAT(text, HasSubstr("pass 'train' ends while 10 of its buffers are held"));
  EXPECT_THAT(text, HasSubstr("'h.0 gathered' (gathered, 1000 B)"));
  EXPECT_THAT(text, HasSubstr("and 2 more"));
  many.clear();
  EXPECT_TRUE(arena_.active()) << "the pass goes on, so it can be ended properly or abandoned";
  arena_.abandon();
  EXPECT_FALSE(arena_.active());
  std::memset(a.data(), 0, 1000);  // the buffer is still valid
  a.release({});
  EXPECT_EQ(memory_.live(), 0);
  EXPECT_FALSE(arena_.planned("train"));
}

TEST_F(StepArenaTest, BuffersOfAnAbandonedPassKeepTheirBytes) {
  pass("train", true, [&] { StepBuffer a = take(1024, "a"); });
  arena_.begin("train", false);
  StepBuffer kept = take(1024, "a");
  arena_.abandon();
  std::memset(kept.data(), 7, 1024);
  pass("train", false, [&] {
    StepBuffer a = take(1024, "a");
    EXPECT_NE(a.data(), kept.data());
    std::memset(a.data(), 1, 1024);
  });
  pass("train", false, [&] { take(2048, "a").release({}); });  // needs a larger block than can be allocated
                                                               // now
  EXPECT_FALSE(arena_.planned("train"));
  EXPECT_EQ(static_cast<unsigned char*>(kept.data())[512], 7);
  EXPECT_THAT(message_of<LogicError>([&] { arena_.forget(); }),
              HasSubstr("forget() while buffers are held: 'a'"));
  kept.release({});
  arena_.forget();
  EXPECT_EQ(memory_.live(), 0);
}

TEST_F(StepArenaTest, CallsOutOfOrderAreErrors) {
  EXPECT_THAT(message_of<LogicError>([&] { arena_.end(); }), HasSubstr("end() without begin()"));
  arena_.begin("train", true);
  EXPECT_THAT(message_of<LogicError>([&] { arena_.begin("evaluate", true); }),
              HasSubstr("pass 'evaluate' begins inside pass 'train'"));
  EXPECT_THAT(message_of<LogicError>([&] { arena_.forget(); }), HasSubstr("forget() inside pass 'train'"));
  arena_.end();
  arena_.forget();
  EXPECT_FALSE(arena_.planned("train"));
  EXPECT_EQ(arena_.live_peak("train"), 0);
}

TEST_F(StepArenaTest, RefusedMemoryLeavesTheArenaUsable) {
  LimitResource limited(memory_, 4096, &ledger_);
  StepArena arena(limited, ledger_);
  arena.begin("train", true);
  {
    StepBuffer a = arena.acquire(2048, Category::activations, "a");
    EXPECT_THAT(message_of<OutOfMemory>([&] { arena.acquire(4096, Category::gathered, "too much"); }),
                HasSubstr("'too much' (gathered)"));
  }
  arena.end();
  EXPECT_EQ(arena.live_peak("train"), 2048);
  EXPECT_TRUE(arena.planned("train"));
}

TEST_F(StepArenaTest, MovesKeepOneOwner) {
  StepBuffer a = take(100, "a");
  void* data = a.data();
  StepBuffer b = std::move(a);
  EXPECT_FALSE(a);  // NOLINT(bugprone-use-after-move): moved from is empty
  EXPECT_EQ(b.data(), data);
  StepBuffer c = take(200, "c");
  c = std::move(b);
  EXPECT_EQ(memory_.live(), 1);
  EXPECT_EQ(c.bytes(), 100);
  c.release({});
  EXPECT_EQ(memory_.live(), 0);
}

TEST_F(StepArenaTest, BuffersThatOutliveTheArenaReturnNothingToIt) {
  std::vector<StepBuffer> outliving(3);
  {
    StepArena arena(memory_, ledger_);
    arena.begin("train", true);
    { const StepBuffer planned = arena.acquire(64, Category::activations, "planned"); }
    arena.end();
    arena.begin("train", false);
    outliving[0] = arena.acquire(64, Category::activations, "in the block");
    outliving[1] = arena.acquire(4096, Category::gradients, "beside it");
    outliving[2] = arena.acquire(0, Category::activations, "empty");
    EXPECT_TRUE(outliving[0]);
  }
  EXPECT_FALSE(outliving[0]);
  EXPECT_EQ(ledger_.total(Tier::device), 0) << "the arena takes back what its buffers hold";
  outliving[1].release();
  const StepBuffer moved = std::move(outliving[2]);
  outliving.clear();
  EXPECT_EQ(ledger_.total(Tier::device), 0);
  EXPECT_TRUE(complaints_.empty());
}

TEST_F(StepArenaTest, PoisonFillsOnAcquireAndRelease) {
  arena_.set_poison(true);
  const auto step = [&] {
    StepBuffer a = take(300, "a");
    auto* bytes = static_cast<unsigned char*>(a.data());
    EXPECT_EQ(bytes[0], 0xff);
    EXPECT_EQ(bytes[299], 0xff);
    std::memset(bytes, 1, 300);
    a.release({});
    if (arena_.planned("train")) {
      EXPECT_EQ(bytes[299], 0xff);  // the block still exists and can be inspected
    }
  };
  pass("train", true, step);
  pass("train", false, step);
}

TEST(StepArenaOnMeta, TouchesNothing) {
  auto device = make_device({DeviceKind::meta, 0, 1});
  Ledger ledger;
  TrackingResource memory(device->memory(Tier::device), ledger);
  StepArena arena(memory, ledger);
  for (int pass = 0; pass < 3; ++pass) {
    arena.begin("plan", pass == 0);
    StepBuffer huge = arena.acquire(std::int64_t{1} << 45, Category::activations, "huge");
    EXPECT_NE(huge.data(), nullptr);
    StepBuffer more = arena.acquire(std::int64_t{1} << 44, Category::gathered, "more");
    huge.release({});
    more.release({});
    arena.end();
  }
  EXPECT_EQ(ledger.account(Tier::device).peak, (std::int64_t{1} << 45) + (std::int64_t{1} << 44));
}

// Random steps with work on a worker stream: a writer fills its buffer and later checks that no other one
// wrote there. Sizes and order repeat in each pass, with occasional exceptions.
TEST(StepArenaProperty, NobodyWritesIntoAnothersBuffer) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    auto device = make_device({DeviceKind::cpu, 0, 1});
    Ledger ledger;
    TrackingResource memory(device->memory(Tier::device), ledger);
    std::atomic<int> damaged{0};
    {
      StepArena arena(memory, ledger);
      std::vector<std::unique_ptr<Stream>> streams;
      for (int i = 0; i < 2; ++i) streams.push_back(device->create_stream("worker"));
      for (int pass = 0; pass < 8; ++pass) {
        std::mt19937_64 draw(pass == 5 ? seed + 1000 : seed);  // one pass differs
        arena.begin("train", pass == 1);
        std::vector<std::pair<StepBuffer, Event>> live;
        for (int i = 0; i < 60; ++i) {
          if (live.size() > 6 || (!live.empty() && draw() % 3 == 0)) {
            const auto at = live.begin() + static_cast<std::ptrdiff_t>(draw() % live.size());
            at->first.release(at->second);
            live.erase(at);
            continue;
          }
          const auto bytes = static_cast<std::int64_t>(draw() % 3000);
          StepBuffer buffer = arena.acquire(bytes, Category::workspace, "random");
          Stream& stream = *streams[draw() % streams.size()];
          for (const Event& event : buffer.ready()) stream.wait(event);
          const auto pattern = static_cast<unsigned char>(draw() % 256);
          stream.enqueue("fill", [data = buffer.data(), bytes, pattern] {
            std::memset(data, pattern, static_cast<std::size_t>(bytes));
          });
          stream.enqueue("check",
                         [data = static_cast<unsigned char*>(buffer.data()), bytes, pattern, &damaged] {
                           for (std::int64_t b = 0; b < bytes; ++b) damaged += data[b] != pattern;
                         });
          live.emplace_back(std::move(buffer), stream.record());
        }
        for (auto& [buffer, event] : live) buffer.release(event);
        arena.end();
        const TierAccount account = ledger.account(Tier::device);
        EXPECT_EQ(account.current.total(), account.current[Category::other]);
        EXPECT_EQ(account.current.total(), arena.block_bytes());
      }
      for (auto& stream : streams) stream->synchronize();
    }
    EXPECT_EQ(damaged, 0);
    EXPECT_EQ(memory.live(), 0);
    EXPECT_EQ(memory.mismatches(), 0);
  }
}

TEST_F(StepArenaTest, ABufferUsedOnAStreamIsReusedBehindItsWork) {
  const std::unique_ptr<Device> device = make_device({});
  const std::unique_ptr<Stream> stream = device->create_stream("worker");
  const auto step = [&] {
    { StepBuffer first = take(4096); }
    StepBuffer second = take(4096);
  };
  pass("train", true, step);
  arena_.begin("train", false);
  {
    const auto gate = std::make_shared<HostEvent>();
    {
      StepBuffer first = take(4096);
      first.used_on(*stream);
      stream->wait(Event(gate));
      stream->enqueue("late", [] {});
    }
    StepBuffer second = take(4096);
    ASSERT_EQ(second.ready().size(), 1u) << "the stream still uses the memory";
    EXPECT_FALSE(second.ready()[0].query());
    gate->complete();
    second.ready()[0].wait();
  }
  arena_.end();
}

}  // namespace
}  // namespace tranche
