#include "tranche/device/memory_timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tranche/core/error.h"
#include "tranche/device/memory_resources.h"
#include "tranche/device/step_arena.h"

namespace tranche {
namespace {

using ::testing::HasSubstr;
using Kind = MemoryEvent::Kind;

constexpr std::size_t device_tier = static_cast<std::size_t>(Tier::device);

std::int64_t sum_of(const std::vector<BornItem>& items) {
  std::int64_t sum = 0;
  for (const BornItem& item : items) sum += item.bytes * item.count;
  return sum;
}

void expect_equal(const CategoryBytes& a, const CategoryBytes& b, const std::string& where) {
  for (const Category category : all_categories) {
    EXPECT_EQ(a[category], b[category]) << where << ", " << name_of(category);
  }
}

/// Changes of a ledger in random order: buffers of a resource, passes of an arena, phases, steps.
class RandomWork {
 public:
  RandomWork(Ledger& ledger, std::uint64_t seed)
      : ledger_(ledger),
        draw_(seed),
        upstream_(make_meta_resource(Tier::device)),
        memory_(*upstream_, ledger),
        arena_(memory_, ledger) {}
  /// Makes one call; returns false if it did not change the ledger.
  void operator()() {
    static constexpr const char* phases[] = {"forward", "backward", "reduce", "step"};
    switch (draw_() % 8) {
      case 0:
      case 1:
      case 2:
        buffers_.emplace_back(memory_, static_cast<std::int64_t>(draw_() % 5000), category(), tag());
        break;
      case 3:
      case 4:
        if (!buffers_.empty()) {
          std::swap(buffers_[draw_() % buffers_.size()], buffers_.back());
          buffers_.pop_back();
        }
        break;
      case 5:
        ledger_.set_phase(phases[draw_() % 4], draw_() % 2 == 0 ? "" : "h." + std::to_string(draw_() % 3));
        break;
      default:
        pass();
    }
  }

 private:
  Category category() { return all_categories[draw_() % all_categories.size()]; }
  std::string tag() { return "tag " + std::to_string(draw_() % 4); }
  /// Runs the same pass every time: first dynamic, then recorded, then planned.
  void pass() {
    arena_.begin("train", passes_++ == 1);
    {
      const StepBuffer a = arena_.acquire(1000, Category::activations, "a");
      StepBuffer g = arena_.acquire(3000, Category::gathered, "h.1 gathered");
      g.release();
      const StepBuffer c = arena_.acquire(2000, Category::communication, "c");
    }
    arena_.end();
  }

  Ledger& ledger_;
  std::mt19937_64 draw_;
  std::unique_ptr<MemoryResource> upstream_;
  TrackingResource memory_;
  StepArena arena_;
  int passes_ = 0;
  std::vector<Buffer> buffers_;
};

TEST(MemoryTimeline, SumsEqualTheLedgerAtEveryEvent) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const std::string where = "seed " + std::to_string(seed);
    Ledger ledger;
    RandomWork work(ledger, seed);
    for (std::uint64_t i = 0; i < seed; ++i) work();  // the timeline starts with a ledger that is not empty
    ledger.reset_peaks();
    MemoryTimeline timeline(ledger);
    std::vector<std::pair<std::int64_t, CategoryBytes>> seen;  // the number of events so far, and the
                                                               // ledger's figures at that time
    for (int i = 0; i < 200; ++i) {
      work();
      if (i % 3 == 0) timeline.end_step(i / 3 + 1);
      seen.emplace_back(timeline.record().events(), ledger.account(Tier::device).current);
    }
    const MemoryRecord record = timeline.record();
    ASSERT_EQ(record.dropped, 0);
    std::size_t next = 0;
    record.replay([&](const MemoryEvent&, std::int64_t number, const MemoryState& state) {
      EXPECT_GE(state.block_free[device_tier], 0) << where;
      EXPECT_LE(state.block_free[device_tier], state.current[device_tier][Category::other]) << where;
      while (next < seen.size() && seen[next].first <= number) ++next;
      for (; next < seen.size() && seen[next].first == number + 1; ++next) {
        expect_equal(state.current[device_tier], seen[next].second,
                     where + ", event " + std::to_string(number));
      }
    });
    EXPECT_GE(next, seen.size() - 1) << where;

    const TierAccount account = ledger.account(Tier::device);
    const MemoryRecord::Peak& peak = record.peaks[device_tier];
    EXPECT_EQ(peak.bytes, account.peak) << where;
    expect_equal(peak.categories, account.at_peak, where + ", at the peak");
    EXPECT_LE(peak.block_free, peak.categories[Category::other]) << where;
    const std::string unit = record.units[peak.unit];
    EXPECT_EQ(record.phases[peak.phase] + (unit.empty() ? "" : " ") + unit, account.peak_phase) << where;
    EXPECT_EQ(sum_of(record.live_behind(Tier::device, peak.event)), account.peak) << where;
    CategoryBytes highest;
    std::int64_t total = 0;
    for (const MemoryRecord::PhasePeak& phase : record.by_phase) {
      total = std::max(total, phase.total[device_tier]);
      for (const Category category : all_categories) {
        highest[category] = std::max(highest[category], phase.categories[device_tier][category]);
      }
    }
    EXPECT_EQ(total, account.peak) << where;
    expect_equal(highest, account.category_peak, where + ", highest of any phase");
  }
}

TEST(MemoryTimeline, KeepsTheFirstAndTheLatestAndTheSumOfWhatIsBetween) {
  Ledger whole_ledger, short_ledger;
  MemoryTimeline whole(whole_ledger), bounded(short_ledger, {16});
  RandomWork whole_work(whole_ledger, 7), short_work(short_ledger, 7);
  for (int i = 0; i < 100; ++i) {
    whole_work();
    short_work();
  }
  const MemoryRecord all = whole.record(), some = bounded.record();
  EXPECT_EQ(some.first.size(), 16u);
  EXPECT_EQ(some.latest.size(), 16u);
  ASSERT_GT(some.dropped, 0);
  EXPECT_EQ(some.events(), all.events());
  std::vector<MemoryState> states;
  all.replay([&](const MemoryEvent&, std::int64_t, const MemoryState& state) { states.push_back(state); });
  some.replay([&](const MemoryEvent& event, std::int64_t number, const MemoryState& state) {
    const MemoryState& same = states.at(static_cast<std::size_t>(number));
    expect_equal(state.current[device_tier], same.current[device_tier], "event " + std::to_string(number));
    EXPECT_EQ(state.block_free[device_tier], same.block_free[device_tier]);
    EXPECT_EQ(state.phase, same.phase);
    EXPECT_GE(event.seconds, some.began);
  });
  EXPECT_EQ(some.peaks[device_tier].bytes, all.peaks[device_tier].bytes)
      << "peaks are kept whatever is dropped";
  EXPECT_EQ(some.peaks[device_tier].event, all.peaks[device_tier].event);
  EXPECT_TRUE(some.live_behind(Tier::device, 20).empty()) << "not known, and so not told";
  EXPECT_LT(bounded.own_bytes(), whole.own_bytes());
}

TEST(MemoryTimeline, NamesWhereAnItemWasBorn) {
  Ledger ledger;
  ledger.set_phase("start");
  ledger.allocated(Tier::host, Category::optimizer, 512, "before");
  MemoryTimeline timeline(ledger);
  ledger.set_phase("forward", "h.0");
  ledger.allocated(Tier::host, Category::activations, 1024, "block activations");
  ledger.set_phase("forward", "h.1");
  ledger.allocated(Tier::host, Category::activations, 1024, "block activations");
  ledger.allocated(Tier::host, Category::activations, 1024, "block activations");
  ledger.allocated(Tier::host, Category::gathered, 256, "h.0 gathered");
  ledger.set_phase("backward", "h.1");
  ledger.released(Tier::host, Category::activations, 1024, "block activations");
  const MemoryRecord record = timeline.record();
  const std::vector<BornItem> peak = record.live_behind(Tier::host, record.peaks[1].event);
  ASSERT_EQ(peak.size(), 4u);
  EXPECT_EQ(peak[0].unit, "h.1");
  EXPECT_EQ(peak[0].count, 2);
  EXPECT_EQ(peak[0].phase, "forward");
  EXPECT_EQ(peak[1].unit, "h.0");
  EXPECT_EQ(peak[2].tag, "before");
  EXPECT_EQ(peak[2].phase, "start");
  EXPECT_EQ(peak[3].unit, "h.0") << "its tag says whose it is, though h.1 was at work";
  const std::vector<BornItem> after = record.live_behind(Tier::host, record.events() - 1);
  ASSERT_EQ(after.size(), 4u);
  EXPECT_EQ(after[0].count, 1) << "the youngest went first";
}

TEST(MemoryTimeline, OneAtATimeAndForAtLeastOneEvent) {
  Ledger ledger;
  {
    const MemoryTimeline timeline(ledger);
    try {
      const MemoryTimeline second(ledger);
      FAIL();
    } catch (const LogicError& error) {
      EXPECT_THAT(error.message(), HasSubstr("one observer at a time"));
    }
  }
  const MemoryTimeline again(ledger);  // the first timeline has been destroyed
  Ledger other;
  try {
    const MemoryTimeline none(other, {0});
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.message(), HasSubstr("timeline of 0 events"));
  }
}

TEST(MemoryTimeline, ManyThreadsAreOneSequence) {
  Ledger ledger;
  MemoryTimeline timeline(ledger);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&ledger, t] {
      const std::string tag = "thread " + std::to_string(t);
      for (int i = 0; i < 500; ++i) {
        ledger.allocated(Tier::device, Category::workspace, 256, tag);
        ledger.released(Tier::device, Category::workspace, 256, tag);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const MemoryRecord record = timeline.record();
  EXPECT_EQ(record.events(), 4000);
  double before = record.began;
  record.replay([&](const MemoryEvent& event, std::int64_t, const MemoryState&) {
    EXPECT_GE(event.seconds, before);
    before = event.seconds;
  });
  EXPECT_EQ(record.peaks[device_tier].bytes, ledger.account(Tier::device).peak);
}

}  // namespace
}  // namespace tranche
