#include "tranche/device/ledger.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace tranche {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::int64_t sum_of(const std::vector<LiveItem>& items) {
  std::int64_t sum = 0;
  for (const LiveItem& item : items) sum += item.bytes;
  return sum;
}

TEST(FormatBytes, RoundsAndChangesUnit) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(12), "12 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1.00 KiB");
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(format_bytes((1 << 20) - 1), "1.00 MiB");
  EXPECT_EQ(format_bytes(std::int64_t{3} << 29), "1.50 GiB");
  EXPECT_EQ(format_bytes(-2048), "-2.00 KiB");
  EXPECT_EQ(format_bytes(std::int64_t{1} << 62), "4.00 EiB");
}

TEST(Ledger, NamesThePeak) {
  Ledger ledger;
  EXPECT_EQ(ledger.table(), "no memory is held\n");
  ledger.set_phase("start");
  ledger.allocated(Tier::device, Category::parameters, 1024, "h.0");
  ledger.set_phase("backward", "h.1");
  ledger.allocated(Tier::device, Category::gradients, 2048, "h.1 gradient");
  ledger.set_phase("step");
  ledger.released(Tier::device, Category::gradients, 2048, "h.1 gradient");
  ledger.allocated(Tier::device, Category::optimizer, 512, "late");
  const TierAccount account = ledger.account(Tier::device);
  EXPECT_EQ(account.peak, 3072);
  EXPECT_EQ(account.peak_phase, "backward h.1");
  EXPECT_EQ(account.at_peak[Category::gradients], 2048);
  EXPECT_EQ(account.at_peak[Category::optimizer], 0);
  EXPECT_EQ(account.current.total(), 1536);
  ASSERT_EQ(account.live_at_peak.size(), 2u);
  EXPECT_EQ(account.live_at_peak[0].tag, "h.1 gradient");
  EXPECT_EQ(account.live_at_peak[1].tag, "h.0");
  EXPECT_THAT(ledger.table(), HasSubstr("device memory"));
  EXPECT_THAT(ledger.table(), HasSubstr("gradients"));
  EXPECT_THAT(ledger.table(), HasSubstr("3.00 KiB   (peak in backward h.1)"));
  EXPECT_THAT(ledger.table(), Not(HasSubstr("host memory")));
  EXPECT_EQ(ledger.account(Tier::host).peak, 0);

  ledger.reset_peaks();
  const TierAccount fresh = ledger.account(Tier::device);
  EXPECT_EQ(fresh.peak, 1536);
  EXPECT_EQ(fresh.peak_phase, "step");
  EXPECT_EQ(sum_of(fresh.live_at_peak), 1536);
}

TEST(Ledger, ArenaSlotsTakeFromOtherAndExplainALevelPeak) {
  Ledger ledger;
  ledger.allocated(Tier::device, Category::other, 4096, step_arena_tag);
  ledger.assigned_to_step(Tier::device, Category::other, 4096);
  ledger.occupied(Tier::device, Category::activations, 1024, "a");
  ledger.occupied(Tier::device, Category::gathered, 2048, "g");
  ledger.vacated(Tier::device, Category::activations, 1024, "a");
  const TierAccount account = ledger.account(Tier::device);
  EXPECT_EQ(account.current[Category::gathered], 2048);
  EXPECT_EQ(account.current[Category::other], 2048);
  EXPECT_EQ(account.persistent.total(), 0);
  EXPECT_EQ(account.peak, 4096);
  EXPECT_EQ(account.at_peak[Category::other], 1024) << "of level totals the fullest instant counts";
  ASSERT_EQ(account.live_at_peak.size(), 3u);
  EXPECT_EQ(account.live_at_peak[0].tag, "g");
  EXPECT_EQ(sum_of(account.live_at_peak), 4096);
}

// Compares the ledger with a model that keeps all entries and recomputes everything.
void random_sequence(std::uint64_t seed) {
  struct Entry {
    Tier tier;
    Category category;
    std::int64_t bytes;
    std::string tag;
    bool slot;
  };
  SCOPED_TRACE("random_sequence(" + std::to_string(seed) + ")");
  std::mt19937_64 draw(seed);
  Ledger ledger;
  std::vector<Entry> live;
  struct Model {
    CategoryBytes current, category_peak, at_peak;
    std::int64_t peak = 0;
  };
  std::array<Model, tier_count> models;
  for (int step = 0; step < 400; ++step) {
    const bool take = live.empty() || draw() % 5 < 3;
    if (take) {
      Entry entry{all_tiers[draw() % tier_count], all_categories[draw() % category_count],
                  static_cast<std::int64_t>(draw() % 8) * 256, "tag " + std::to_string(draw() % 6), false};
      const auto tier = static_cast<std::size_t>(entry.tier);
      if (draw() % 3 == 0 && models[tier].current[Category::other] >= entry.bytes) entry.slot = true;
      if (entry.slot && entry.category != Category::other) {
        ledger.occupied(entry.tier, entry.category, entry.bytes, entry.tag);
      } else {
        entry.slot = false;
        ledger.allocated(entry.tier, entry.category, entry.bytes, entry.tag);
      }
      live.push_back(entry);
    } else {
      const std::size_t at = draw() % live.size();
      const Entry entry = live[at];
      // A slot's bytes are replaced by an `other` buffer; that memory must not be freed before the slot.
      std::int64_t other = 0;
      for (const Entry& each : live) {
        if (each.tier != entry.tier) continue;
        if (!each.slot && each.category == Category::other) other += each.bytes;
        if (each.slot) other -= each.bytes;
      }
      if (!entry.slot && entry.category == Category::other && other < entry.bytes) continue;
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(at));
      if (entry.slot) {
        ledger.vacated(entry.tier, entry.category, entry.bytes, entry.tag);
      } else {
        ledger.released(entry.tier, entry.category, entry.bytes, entry.tag);
      }
    }
    for (const Tier tier : all_tiers) {
      Model& model = models[static_cast<std::size_t>(tier)];
      model.current = {};
      std::int64_t total = 0;
      for (const Entry& entry : live) {
        if (entry.tier != tier) continue;
        model.current[entry.category] += entry.bytes;
        if (entry.slot) {
          model.current[Category::other] -= entry.bytes;
        } else {
          total += entry.bytes;
        }
      }
      for (const Category c : all_categories) {
        model.category_peak[c] = std::max(model.category_peak[c], model.current[c]);
      }
      if (total > model.peak ||
          (total == model.peak && model.current[Category::other] < model.at_peak[Category::other])) {
        model.peak = total;
        model.at_peak = model.current;
      }
      const TierAccount account = ledger.account(tier);
      ASSERT_EQ(account.current.bytes, model.current.bytes) << "step " << step;
      ASSERT_EQ(account.current.total(), total) << "step " << step;
      ASSERT_EQ(account.peak, model.peak) << "step " << step;
      ASSERT_EQ(account.at_peak.bytes, model.at_peak.bytes) << "step " << step;
      ASSERT_EQ(account.at_peak.total(), model.peak) << "step " << step;
      ASSERT_EQ(account.category_peak.bytes, model.category_peak.bytes) << "step " << step;
    }
    if (draw() % 50 == 0) {
      ledger.reset_peaks();
      for (Model& model : models) {
        model.category_peak = model.at_peak = model.current;
        model.peak = model.current.total();
      }
    }
  }
}

TEST(Ledger, CategoriesAlwaysAddUpAndPeaksAreRight) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) random_sequence(seed);
}

// Without slots the list of the peak contains exactly the buffers that existed then.
TEST(Ledger, ListOfThePeakIsExact) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 draw(seed);
    Ledger ledger;
    std::vector<std::pair<std::int64_t, std::string>> live, at_peak;
    std::int64_t total = 0, peak = 0;
    for (int step = 0; step < 300; ++step) {
      if (live.empty() || draw() % 9 < 5) {
        live.emplace_back(256 * (1 + static_cast<std::int64_t>(draw() % 5)),
                          "t" + std::to_string(draw() % 4));
        ledger.allocated(Tier::host, Category::workspace, live.back().first, live.back().second);
        total += live.back().first;
        if (total > peak) {
          peak = total;
          at_peak = live;
        }
      } else {
        const auto at = live.begin() + static_cast<std::ptrdiff_t>(draw() % live.size());
        ledger.released(Tier::host, Category::workspace, at->first, at->second);
        total -= at->first;
        live.erase(at);
      }
    }
    std::vector<std::pair<std::int64_t, std::string>> listed;
    for (const LiveItem& item : ledger.account(Tier::host).live_at_peak)
      listed.emplace_back(item.bytes, item.tag);
    std::sort(listed.begin(), listed.end());
    std::sort(at_peak.begin(), at_peak.end());
    EXPECT_EQ(listed, at_peak);
  }
}

TEST(Ledger, IsThreadSafe) {
  Ledger ledger;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&ledger, t] {
      const std::string tag = "thread " + std::to_string(t);
      for (int i = 0; i < 200; ++i) {
        ledger.allocated(Tier::device, Category::workspace, 256, tag);
        ledger.account(Tier::device);
        ledger.released(Tier::device, Category::workspace, 256, tag);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  const TierAccount account = ledger.account(Tier::device);
  EXPECT_EQ(account.current.total(), 0);
  EXPECT_GE(account.peak, 256);
  EXPECT_LE(account.peak, 4 * 256);
}

}  // namespace
}  // namespace tranche
