#include "kernels/cuda/geometry.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace tranche::kernels::cuda {
namespace {

/// Every element must be in one group or one edge, and every group must start where all operands are aligned.
TEST(Geometry, AVectorRangeCoversEveryElementOnce) {
  for (std::int64_t elements = 0; elements <= 70; ++elements) {
    for (const int width : {1, 2, 4, 8}) {
      for (std::uint64_t a = 0; a < 16; a += 2) {
        for (const std::uint64_t b : {0u, 4u, 8u, 12u}) {
          const Demand first{a, 2, std::min(16, 2 * width)}, second{b, 4, std::min(16, 4 * width)};
          const VectorRange range = vector_range(elements, width, {first, second});
          std::multiset<std::int64_t> seen;
          for (std::int64_t group = 0; group < range.groups; ++group) {
            const std::int64_t start = range.first_of(group);
            for (int k = 0; k < range.width; ++k) seen.insert(start + k);
            if (range.width == width) {
              EXPECT_EQ(
                  (a + static_cast<std::uint64_t>(2 * start)) % static_cast<std::uint64_t>(first.modulus),
                  0u);
              EXPECT_EQ(
                  (b + static_cast<std::uint64_t>(4 * start)) % static_cast<std::uint64_t>(second.modulus),
                  0u);
            }
          }
          for (int i = 0; i < range.edges(); ++i) seen.insert(range.edge(i));
          ASSERT_EQ(static_cast<std::int64_t>(seen.size()), elements) << width << ' ' << a << ' ' << b;
          if (elements > 0) {
            EXPECT_EQ(*seen.begin(), 0);
            EXPECT_EQ(*seen.rbegin(), elements - 1);
          }
          EXPECT_EQ(std::set<std::int64_t>(seen.begin(), seen.end()).size(), seen.size());
          EXPECT_LT(range.edges(), 2 * width);
        }
      }
    }
  }
}

TEST(Geometry, OperandsThatNeverAlignTogetherGoElementByElement) {
  // Two fp32 operands whose offsets differ by 4 bytes.
  const VectorRange range = vector_range(100, 4, {{0, 4, 16}, {4, 4, 16}});
  EXPECT_EQ(range.width, 1);
  EXPECT_EQ(range.groups, 100);
  // Both are offset by 4 bytes: three elements, then groups.
  const VectorRange late = vector_range(100, 4, {{4, 4, 16}, {20, 4, 16}});
  EXPECT_EQ(late.head, 3);
  EXPECT_EQ(late.groups, 24);
  EXPECT_EQ(late.edges(), 4);
  // The draws of a random stream count like an operand.
  EXPECT_EQ(vector_range(100, 4, {{0, 4, 16}, {1, 1, 4}}).width, 1);
}

TEST(Geometry, GridsCoverTheWorkAndStayWithinTheirWaves) {
  EXPECT_EQ(grid_blocks(0, 256, 132, 8), 0u);
  EXPECT_EQ(grid_blocks(1, 256, 132, 8), 1u);
  EXPECT_EQ(grid_blocks(256, 256, 132, 8), 1u);
  EXPECT_EQ(grid_blocks(257, 256, 132, 8), 2u);
  EXPECT_EQ(grid_blocks(std::int64_t{1} << 40, 256, 132, 8), 132u * 8 * 4);
  EXPECT_EQ(grid_blocks(std::int64_t{1} << 40, 256, 132, 8, 1), 132u * 8);
}

TEST(Geometry, TilesCoverNarrowAndWideRows) {
  for (const std::int64_t groups : {1, 2, 3, 31, 32, 33, 96, 255, 256, 257, 5000}) {
    const Tile tile = tile_of(groups, 256);
    EXPECT_EQ(tile.x * tile.y, 256);
    EXPECT_TRUE(tile.x >= std::min<std::int64_t>(groups, 256)) << groups;
    EXPECT_TRUE(tile.x == 1 || tile.x / 2 < groups) << groups;
  }
}

TEST(Geometry, RowsGoInGroupsWhenEachStartsAligned) {
  EXPECT_EQ(row_width(768, 8, {{0, 2, 16}}), 8);
  EXPECT_EQ(row_width(772, 8, {{0, 2, 16}}), 1);  // the second row starts 8 bytes off
  EXPECT_EQ(row_width(768, 8, {{2, 2, 16}}), 1);
  EXPECT_EQ(row_width(768, 8, {{32, 2, 16}, {48, 2, 16}}), 8);
  EXPECT_EQ(row_width(0, 8, {{0, 2, 16}}), 8);
}

}  // namespace
}  // namespace tranche::kernels::cuda
