#include "device/range_placer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <stdexcept>
#include <vector>

#include "tranche/core/error.h"

namespace tranche {
namespace {

using detail::RangePlacer;

constexpr std::int64_t page = 4096;

/// Counts pages, and reports calls that a driver would not allow.
class FakePages : public detail::PageSource {
 public:
  explicit FakePages(std::int64_t pages, std::int64_t limit = 1 << 20)
      : memory(limit), pages_(pages), backed_(static_cast<std::size_t>(pages), 0) {}
  std::int64_t page_bytes() const override { return page; }
  std::int64_t pages() const override { return pages_; }
  bool map(std::int64_t first, std::int64_t count) override {
    if (broken) throw std::runtime_error("the driver broke");
    EXPECT_GT(count, 0);
    EXPECT_LE(first + count, pages_);
    if (mapped + count > memory) return false;
    ++maps;
    for (std::int64_t i = first; i < first + count; ++i) {
      EXPECT_EQ(backed_[static_cast<std::size_t>(i)], 0) << "page " << i << " mapped twice";
      backed_[static_cast<std::size_t>(i)] = maps;
    }
    pieces.insert({first, count});
    mapped += count;
    return true;
  }
  void unmap(std::int64_t first, std::int64_t count) noexcept override {
    EXPECT_EQ(pieces.erase({first, count}), 1u) << "not a piece: " << first << ", " << count;
    for (std::int64_t i = first; i < first + count; ++i) backed_[static_cast<std::size_t>(i)] = 0;
    mapped -= count;
  }
  /// The mapping that contains a byte; 0 for none.
  std::int64_t piece_at(std::int64_t offset) const {
    return backed_[static_cast<std::size_t>(offset / page)];
  }

  std::int64_t memory;  ///< pages that may be mapped at a time
  std::int64_t mapped = 0;
  std::int64_t maps = 0;
  bool broken = false;
  std::set<std::pair<std::int64_t, std::int64_t>> pieces;

 private:
  std::int64_t pages_;
  std::vector<std::int64_t> backed_;
};

TEST(RangePlacer, SharesPagesAndMapsWhatItNeeds) {
  FakePages pages(64);
  RangePlacer placer(pages);
  EXPECT_EQ(placer.mapped_bytes(), 0);
  EXPECT_EQ(placer.place(1), 0);
  EXPECT_EQ(placer.place(0), 256) << "empty requests have addresses of their own";
  EXPECT_EQ(placer.place(257), 512);
  EXPECT_EQ(placer.placed_bytes(), 256 + 256 + 512);
  EXPECT_EQ(placer.mapped_bytes(), page);
  EXPECT_EQ(placer.place(page), 1024) << "continues into a new page";
  EXPECT_EQ(placer.mapped_bytes(), 2 * page);
  EXPECT_EQ(placer.place(10 * page), 1024 + page);
  EXPECT_EQ(pages.maps, 3) << "one piece for all pages that a request lacks";
  EXPECT_EQ(placer.mapped_bytes(), 12 * page) << "ends at 11 1/4 pages";
}

TEST(RangePlacer, FreedNeighboursBecomeOnePlace) {
  FakePages pages(8);
  RangePlacer placer(pages);
  std::vector<std::int64_t> at;
  for (int i = 0; i < 16; ++i) at.push_back(*placer.place(256));
  placer.free(at[3], 256);
  placer.free(at[5], 256);
  EXPECT_EQ(placer.mapped_bytes(), page);
  EXPECT_EQ(placer.place(512), page) << "two holes apart do not make a place, so the range goes on";
  placer.free(at[4], 256);
  EXPECT_EQ(placer.place(768), at[3]) << "three holes in a row do";
  placer.free(at[0], 256);
  EXPECT_EQ(placer.place(200), at[0]);
}

TEST(RangePlacer, MappedMemoryIsPreferredToLowerAddresses) {
  FakePages pages(64);
  RangePlacer placer(pages);
  const auto low = *placer.place(page);
  const auto high = *placer.place(page);
  placer.free(low, page);
  placer.trim();
  EXPECT_EQ(placer.mapped_bytes(), page);
  const auto end = *placer.place(2 * page);
  EXPECT_EQ(end, 2 * page);
  placer.free(end, 2 * page);
  EXPECT_EQ(placer.place(256), end) << "page 0 is free too, but has no memory";
  EXPECT_EQ(pages.mapped, 3);
  placer.free(high, page);
}

TEST(RangePlacer, FreedMemoryStaysUntilTheRangeGrows) {
  FakePages pages(64);
  RangePlacer placer(pages);
  const auto a = *placer.place(4 * page);
  const auto keep = *placer.place(256);
  placer.free(a, 4 * page);
  EXPECT_EQ(placer.mapped_bytes(), 5 * page);
  EXPECT_EQ(placer.place(3 * page), a) << "used again as it is";
  EXPECT_EQ(pages.maps, 2);
  placer.free(a, 3 * page);
  const auto b = *placer.place(6 * page);
  EXPECT_EQ(b, keep + 256);
  EXPECT_EQ(placer.mapped_bytes(), (1 + 6) * page) << "the four free pages went before six were mapped";
}

TEST(RangePlacer, GrowsIntoPiecesThatAreFreeAlready) {
  FakePages pages(64, 8);
  RangePlacer placer(pages);
  const auto a = *placer.place(4 * page);
  placer.free(a, 4 * page);
  EXPECT_EQ(placer.place(8 * page), a);
  EXPECT_EQ(pages.pieces.size(), 2u) << "four pages were kept, four were added";
}

TEST(RangePlacer, WholePiecesAreOnePiece) {
  FakePages pages(64);
  RangePlacer placer(pages);
  const auto first = *placer.place(100);
  const auto whole = *placer.place(3 * page + 1, true);
  EXPECT_EQ(whole, page);
  EXPECT_EQ(pages.piece_at(whole), pages.piece_at(whole + 3 * page));
  EXPECT_NE(pages.piece_at(whole), pages.piece_at(first));
  EXPECT_EQ(placer.place(page - 256), 256);
  EXPECT_EQ(placer.place(page - 256), 4 * page + 256) << "the end of its last page serves others";
  placer.free(whole, 3 * page + 1);
  const auto again = *placer.place(page, true);
  EXPECT_NE(again, whole) << "those pages are part of a piece that is still in use";
  EXPECT_EQ(placer.place(3 * page), whole);
}

TEST(RangePlacer, RefusesWhatDoesNotFit) {
  FakePages pages(4, 3);
  RangePlacer placer(pages);
  EXPECT_EQ(placer.place(5 * page), std::nullopt) << "more than the addresses";
  EXPECT_EQ(placer.place(std::int64_t{1} << 62), std::nullopt);
  EXPECT_EQ(placer.place(-1), std::nullopt);
  EXPECT_EQ(placer.place(4 * page), std::nullopt) << "more than the memory";
  EXPECT_EQ(placer.mapped_bytes(), 0);
  const auto two = *placer.place(2 * page);
  EXPECT_EQ(placer.place(2 * page, true), std::nullopt);
  EXPECT_EQ(placer.place(page), 2 * page) << "a refusal leaves nothing behind";
  placer.free(two, 2 * page);
  EXPECT_EQ(placer.place(2 * page, true), two);
}

TEST(RangePlacer, AFailureOfTheSourceChangesNothing) {
  FakePages pages(16);
  RangePlacer placer(pages);
  const auto a = *placer.place(page / 2);
  pages.broken = true;
  EXPECT_THROW(placer.place(2 * page), std::runtime_error);
  EXPECT_EQ(placer.place(page / 2), a + page / 2) << "needs no page";
  pages.broken = false;
  EXPECT_EQ(placer.place(2 * page), page);
  EXPECT_EQ(placer.placed_bytes(), 3 * page);
}

TEST(RangePlacer, PartOfTheMissingPagesIsNoUse) {
  FakePages pages(5);
  RangePlacer placer(pages);
  const auto a = *placer.place(page);
  const auto b = *placer.place(page);
  placer.free(a, page);
  placer.trim();
  placer.free(b, page);
  pages.memory = 2;
  EXPECT_EQ(placer.place(3 * page), std::nullopt) << "page 1 is there, page 0 could be, but page 2 could not";
  EXPECT_EQ(placer.mapped_bytes(), page) << "page 0 was given back";
  pages.memory = 3;
  EXPECT_EQ(placer.place(3 * page), 0);
  EXPECT_EQ(pages.pieces.size(), 3u);
}

TEST(RangePlacer, WantsWholePages) {
  class Odd : public FakePages {
   public:
    Odd() : FakePages(1) {}
    std::int64_t page_bytes() const override { return 1000; }
  } odd;
  try {
    RangePlacer placer(odd);
    FAIL() << "1000 bytes are no page";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.message(), ::testing::HasSubstr("pages of 1000 bytes"));
  }
}

// Random requests: places are aligned, do not overlap, and are inside mapped memory; the accounting adds up;
// equal requests get equal places; at the end everything is freed.
TEST(RangePlacer, AnySequence) {
  for (unsigned seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::vector<std::optional<std::int64_t>> places[2];
    for (auto& recorded : places) {
      std::mt19937 draw(seed);
      FakePages pages(48, 32);
      {
        RangePlacer placer(pages);
        std::vector<std::pair<std::int64_t, std::int64_t>> live;
        std::int64_t placed = 0;
        for (int step = 0; step < 300; ++step) {
          if (draw() % 16 == 0) placer.trim();
          if (!live.empty() && draw() % 2 == 0) {
            const std::size_t which = draw() % live.size();
            placer.free(live[which].first, live[which].second);
            placed -= std::max<std::int64_t>(256, aligned_bytes(live[which].second));
            live.erase(live.begin() + static_cast<std::ptrdiff_t>(which));
          } else {
            const std::int64_t bytes = draw() % 3 == 0 ? draw() % (8 * page) : draw() % 2000;
            const bool whole = draw() % 8 == 0;
            const auto at = placer.place(bytes, whole);
            recorded.push_back(at);
            if (at) {
              const std::int64_t size = std::max<std::int64_t>(256, aligned_bytes(bytes));
              ASSERT_EQ(*at % 256, 0);
              for (const auto& [other, length] : live) {
                ASSERT_TRUE(*at + size <= other || other + length <= *at) << "step " << step;
              }
              for (std::int64_t b = *at; b < *at + size; b += 256) ASSERT_GT(pages.piece_at(b), 0);
              if (whole) {
                ASSERT_EQ(pages.piece_at(*at), pages.piece_at(*at + size - 1));
              }
              live.emplace_back(*at, bytes);
              placed += size;
            }
          }
          ASSERT_EQ(placer.placed_bytes(), placed);
          ASSERT_EQ(placer.mapped_bytes(), pages.mapped * page);
        }
        for (const auto& [at, bytes] : live) placer.free(at, bytes);
        placer.trim();
        ASSERT_EQ(pages.mapped, 0);
        ASSERT_EQ(placer.placed_bytes(), 0);
        ASSERT_EQ(placer.place(32 * page), 0) << "one place again";
      }
      ASSERT_EQ(pages.mapped, 0) << "the placer takes its memory along";
    }
    EXPECT_EQ(places[0], places[1]);
  }
}

}  // namespace
}  // namespace tranche
