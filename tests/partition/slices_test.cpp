// Slices of tensors: every element is in one slice, or in as many as there are ranks that share it.

#include "partition/slices.h"

#include <gmock/gmock.h>

#include <cstdint>
#include <random>
#include <vector>

#include "tests/core/error_text.h"
#include "tranche/core/error.h"

namespace tranche::detail {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(Slices, CutOneDimensionByWholeGrains) {
  const Shape weight{4, 36};  // a fused query, key and value with 6 heads of 2
  const TensorCut heads{1, 3, 2};
  EXPECT_EQ(grains_of(weight, heads), 6);
  EXPECT_EQ(slice_of(weight, heads, 1, 3), (Box{{0, 4, 1, 4}, {4, 12, 3, 4}}));
  EXPECT_EQ(shape_of(slice_of(weight, heads, 1, 3)), (Shape{4, 12}));
  EXPECT_EQ(slice_of(weight, {}, 1, 3), whole_box(weight));
  EXPECT_EQ(slice_of(weight, heads, 0, 1), whole_box(weight));
}

TEST(Slices, PartsOfAVocabularyMayDifferByOneRow) {
  std::vector<std::int64_t> begins;
  for (int part = 0; part < 4; ++part) begins.push_back(grains_of_part(50257, part, 4).begin);
  EXPECT_THAT(begins, ElementsAre(0, 12564, 25128, 37692));
  EXPECT_EQ(grains_of_part(50257, 3, 4).size(), 12565);
}

TEST(Slices, FewerGrainsThanRanksAreSharedByNeighbours) {
  EXPECT_EQ(sharers(2, 8), 4);
  EXPECT_EQ(sharers(8, 8), 1);
  EXPECT_TRUE(can_be_cut(3, 6));
  EXPECT_FALSE(can_be_cut(3, 4));
  for (int part = 0; part < 8; ++part) {
    EXPECT_EQ(grains_of_part(2, part, 8), (ElementRange{part / 4, part / 4 + 1})) << part;
  }
}

TEST(Slices, RefuseWhatDoesNotDivide) {
  const auto refusal = [](const Shape& shape, const TensorCut& cut, int part, int parts) {
    return message_of<InvalidArgument>([&] { (void)slice_of(shape, cut, part, parts); });
  };
  EXPECT_THAT(refusal({4, 35}, {1, 3, 2}, 0, 2), HasSubstr("is not 3 blocks of whole grains of 2 elements"));
  EXPECT_THAT(refusal({4, 35}, {2, 1, 1}, 0, 2), HasSubstr("of shape [4, 35] has no dimension 2 to cut"));
  EXPECT_THAT(refusal({3}, {0, 1, 1}, 0, 4), HasSubstr("part 0 of 3 grains over 4 ranks"));
  EXPECT_THAT(refusal({3}, {0, 1, 1}, 3, 3), HasSubstr("part 3 of 3 grains over 3 ranks"));
}

TEST(Slices, CoverDrawnTensorsAndTellWhereTheirElementsAre) {
  std::mt19937 random(1);
  const auto draw = [&](int from, int to) { return std::uniform_int_distribution(from, to)(random); };
  for (int round = 0; round < 300; ++round) {
    const int rank = draw(1, 3), axis = draw(0, rank - 1), blocks = draw(1, 3), grain = draw(1, 3);
    const int parts = draw(1, 6), grains = draw(0, 1) == 0 ? parts + draw(0, 5) : draw(1, parts);
    if (!can_be_cut(grains, parts)) continue;
    std::vector<std::int64_t> extents;
    for (int a = 0; a < rank; ++a) extents.push_back(a == axis ? blocks * grain * grains : draw(1, 4));
    const Shape shape{std::span<const std::int64_t>(extents)};
    const TensorCut cut{axis, blocks, grain};
    std::vector<int> held(static_cast<std::size_t>(shape.elements()));
    for (int part = 0; part < parts; ++part) {
      const Box box = slice_of(shape, cut, part, parts);
      ASSERT_TRUE(lies_within(box, shape)) << to_string(box);
      std::int64_t next = 0;
      common_runs(shape, box, whole_box(shape), {0, elements_of(box)}, [&](const CommonRun& run) {
        ASSERT_EQ(run.first, next);
        next += run.elements;
        for (std::int64_t i = 0; i < run.elements; ++i) ++held[static_cast<std::size_t>(run.tensor + i)];
      });
      ASSERT_EQ(next, shape_of(box).elements());
    }
    ASSERT_THAT(held, testing::Each(sharers(grains, parts))) << shape.to_string() << " over " << parts;
  }
}

}  // namespace
}  // namespace tranche::detail
