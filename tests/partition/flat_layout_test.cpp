#include "partition/flat_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "tests/core/error_text.h"
#include "tranche/core/error.h"

namespace tranche {
namespace {

using detail::bucket_ranges;
using detail::ElementRange;
using detail::FlatLayout;
using detail::intersect;
using detail::OverlapPiece;
using detail::overlaps;
using detail::TensorPiece;
using test::message_of;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

FlatLayout layout_of(const std::vector<std::int64_t>& sizes, int ranks) {
  return {sizes, ranks};
}

TEST(ElementRange, IntersectionOfRanges) {
  EXPECT_EQ(intersect({0, 10}, {5, 20}), (ElementRange{5, 10}));
  EXPECT_EQ(intersect({5, 20}, {0, 10}), (ElementRange{5, 10}));
  EXPECT_EQ(intersect({0, 10}, {2, 3}), (ElementRange{2, 3}));
  EXPECT_TRUE(intersect({0, 10}, {10, 20}).empty());
  EXPECT_TRUE(intersect({0, 10}, {15, 20}).empty());
  EXPECT_EQ(intersect({0, 10}, {15, 20}).size(), 0);
  EXPECT_EQ((ElementRange{7, 3}.size()), 0);
  EXPECT_TRUE((ElementRange{7, 3}.empty()));
}

TEST(FlatLayout, TheExampleOfItsDescription) {
  const FlatLayout layout = layout_of({10, 300}, 3);
  EXPECT_EQ(layout.ranks(), 3);
  EXPECT_EQ(layout.tensors(), 2);
  EXPECT_EQ(layout.tensor_offset(0), 0);
  EXPECT_EQ(layout.tensor_offset(1), 64);
  EXPECT_EQ(layout.tensor_elements(1), 300);
  EXPECT_EQ(layout.elements(), 310);
  EXPECT_EQ(layout.shard_elements(), 256);
  EXPECT_EQ(layout.padded_elements(), 768);
  EXPECT_EQ(layout.shard_range(1), (ElementRange{256, 512}));
  EXPECT_THAT(layout.shard_pieces(0), ElementsAre(TensorPiece{0, 0, 0, 10}, TensorPiece{1, 0, 64, 192}));
  EXPECT_THAT(layout.shard_pieces(1), ElementsAre(TensorPiece{1, 192, 256, 108}));
  EXPECT_THAT(layout.shard_pieces(2), IsEmpty());
  EXPECT_EQ(layout.owned_elements(0), 202);
  EXPECT_EQ(layout.owned_elements(1), 108);
  EXPECT_EQ(layout.owned_elements(2), 0);
}

TEST(FlatLayout, EmptyForAnyNumberOfRanks) {
  for (const int ranks : {1, 2, 7}) {
    const FlatLayout layout({}, ranks);
    EXPECT_EQ(layout.tensors(), 0);
    EXPECT_EQ(layout.elements(), 0);
    EXPECT_EQ(layout.padded_elements(), 0);
    EXPECT_EQ(layout.shard_elements(), 0);
    EXPECT_EQ(layout.shard_range(ranks - 1), (ElementRange{0, 0}));
    EXPECT_EQ(layout.owned_elements(ranks - 1), 0);
    EXPECT_THAT(layout.pieces({0, 0}), IsEmpty());
    EXPECT_THAT(bucket_ranges(layout, 1000), IsEmpty());
    EXPECT_THAT(overlaps(layout, FlatLayout({}, 3), 2), IsEmpty());
    EXPECT_THAT(message_of<InvalidArgument>([&] { (void)layout.locate(0); }),
                HasSubstr("outside the flat buffer of 0 elements"));
  }
}

TEST(FlatLayout, OneElementOverManyRanks) {
  const FlatLayout layout = layout_of({1}, 5);
  EXPECT_EQ(layout.shard_elements(), 256);
  EXPECT_EQ(layout.padded_elements(), 1280);
  EXPECT_EQ(layout.owned_elements(0), 1);
  for (int rank = 1; rank < 5; ++rank) {
    EXPECT_EQ(layout.owned_elements(rank), 0) << rank;
    EXPECT_THAT(layout.shard_pieces(rank), IsEmpty()) << rank;
  }
  EXPECT_EQ(layout.locate(0), (TensorPiece{0, 0, 0, 1}));
  EXPECT_EQ(layout.locate(1), (TensorPiece{-1, 0, 1, 0}));
  EXPECT_EQ(layout.locate(1279).tensor, -1);
}

TEST(FlatLayout, PrimeSizesOverPrimeRanks) {
  const FlatLayout layout = layout_of({127, 2, 521, 61, 1031}, 7);
  // The tensors end at 127, 130, 713, 829 and 1863.
  EXPECT_EQ(layout.tensor_offset(1), 128);
  EXPECT_EQ(layout.tensor_offset(2), 192);
  EXPECT_EQ(layout.tensor_offset(3), 768);
  EXPECT_EQ(layout.tensor_offset(4), 832);
  EXPECT_EQ(layout.elements(), 1742);
  EXPECT_EQ(layout.shard_elements(), 512);  // 1863 / 7 = 266.1, so two multiples of 256
  EXPECT_EQ(layout.padded_elements(), 3584);
  EXPECT_THAT(layout.shard_pieces(0),
              ElementsAre(TensorPiece{0, 0, 0, 127}, TensorPiece{1, 0, 128, 2}, TensorPiece{2, 0, 192, 320}));
  EXPECT_THAT(layout.shard_pieces(1), ElementsAre(TensorPiece{2, 320, 512, 201}, TensorPiece{3, 0, 768, 61},
                                                  TensorPiece{4, 0, 832, 192}));
  EXPECT_THAT(layout.shard_pieces(3), ElementsAre(TensorPiece{4, 704, 1536, 327}));
  EXPECT_THAT(layout.shard_pieces(4), IsEmpty());
  EXPECT_THAT(layout.shard_pieces(6), IsEmpty());
}

TEST(FlatLayout, ShardsGrowJustBeyondAMultiple) {
  EXPECT_EQ(layout_of({255}, 1).shard_elements(), 256);
  EXPECT_EQ(layout_of({256}, 1).shard_elements(), 256);
  EXPECT_EQ(layout_of({257}, 1).shard_elements(), 512);
  EXPECT_EQ(layout_of({512}, 2).shard_elements(), 256);
  EXPECT_EQ(layout_of({513}, 2).shard_elements(), 512);
  EXPECT_EQ(layout_of({64, 64, 64, 64}, 1).padded_elements(), 256);
  EXPECT_EQ(layout_of({64, 64, 64, 65}, 1).padded_elements(), 512);
  EXPECT_EQ(layout_of({65, 64}, 1).tensor_offset(1), 128);
  EXPECT_EQ(layout_of({63, 64}, 1).tensor_offset(1), 64);
}

TEST(FlatLayout, PartsOfShardsAreTheShardsOfMoreRanks) {
  const std::vector<std::int64_t> sizes{127, 2, 521, 61, 1031};
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (int parts = 1; parts <= 8; ++parts) {
      const FlatLayout cut(sizes, ranks, parts), over_all(sizes, ranks * parts);
      EXPECT_EQ(cut.ranks(), ranks);
      EXPECT_EQ(cut.padded_elements(), over_all.padded_elements());
      EXPECT_EQ(cut.shard_elements(), parts * over_all.shard_elements());
      EXPECT_EQ(cut.shard_range(ranks - 1).begin, over_all.shard_range((ranks - 1) * parts).begin);
      EXPECT_EQ(cut.tensor_offset(4), over_all.tensor_offset(4));
    }
  }
  EXPECT_THAT(message_of<InvalidArgument>([&] { FlatLayout(sizes, 2, 0); }),
              HasSubstr("shards of a flat layout in 0 parts; at least 1 is needed"));
}

TEST(FlatLayout, OneHugeTensor) {
  const std::int64_t huge = (std::int64_t{1} << 50) + 1;
  const FlatLayout layout = layout_of({huge}, 1000);
  EXPECT_EQ(layout.elements(), huge);
  EXPECT_EQ(layout.shard_elements() % 256, 0);
  EXPECT_GE(layout.padded_elements(), huge);
  EXPECT_LT(layout.padded_elements() - 256 * 1000, huge);
  std::int64_t owned = 0;
  for (int rank = 0; rank < 1000; ++rank) owned += layout.owned_elements(rank);
  EXPECT_EQ(owned, huge);
  EXPECT_EQ(layout.locate(huge - 1), (TensorPiece{0, huge - 1, huge - 1, 1}));
  EXPECT_EQ(layout.locate(huge).tensor, -1);
}

TEST(FlatLayout, PiecesOfPartialRanges) {
  const FlatLayout layout = layout_of({10, 300}, 3);
  EXPECT_THAT(layout.pieces({3, 5}), ElementsAre(TensorPiece{0, 3, 3, 2}));
  EXPECT_THAT(layout.pieces({9, 65}), ElementsAre(TensorPiece{0, 9, 9, 1}, TensorPiece{1, 0, 64, 1}));
  EXPECT_THAT(layout.pieces({10, 64}), IsEmpty());
  EXPECT_THAT(layout.pieces({364, 768}), IsEmpty());
  EXPECT_THAT(layout.pieces({363, 768}), ElementsAre(TensorPiece{1, 299, 363, 1}));
  EXPECT_THAT(layout.pieces({5, 5}), IsEmpty());
  EXPECT_THAT(layout.pieces({5, 3}), IsEmpty());
}

TEST(FlatLayout, EveryRefusalSaysWhy) {
  constexpr std::int64_t max64 = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(message_of<InvalidArgument>([] { layout_of({1}, 0); }),
            "flat layout over 0 ranks; at least 1 is needed");
  EXPECT_EQ(message_of<InvalidArgument>([] { layout_of({1}, -2); }),
            "flat layout over -2 ranks; at least 1 is needed");
  EXPECT_EQ(message_of<InvalidArgument>([] {
              layout_of({4, 0}, 1);
            }),
            "tensor 1 of a flat layout has 0 elements; at least 1 is needed");
  EXPECT_EQ(message_of<InvalidArgument>([] { layout_of({-4}, 1); }),
            "tensor 0 of a flat layout has -4 elements; at least 1 is needed");
  const FlatLayout layout = layout_of({10, 300}, 3);
  EXPECT_EQ(message_of<InvalidArgument>([&] { (void)layout.shard_range(3); }),
            "flat layout is over 3 ranks; there is no rank 3");
  EXPECT_EQ(message_of<InvalidArgument>([&] { (void)layout.owned_elements(-1); }),
            "flat layout is over 3 ranks; there is no rank -1");
  EXPECT_EQ(message_of<InvalidArgument>([&] { (void)layout.tensor_offset(2); }),
            "flat layout has 2 tensors; there is no tensor 2");
  EXPECT_EQ(message_of<InvalidArgument>([&] { (void)layout.tensor_elements(-1); }),
            "flat layout has 2 tensors; there is no tensor -1");
  EXPECT_EQ(message_of<InvalidArgument>([&] {
              (void)layout.pieces({0, 769});
            }),
            "range [0, 769) leaves the flat buffer of 768 elements");
  EXPECT_EQ(message_of<InvalidArgument>([&] {
              (void)layout.pieces({-1, 4});
            }),
            "range [-1, 4) leaves the flat buffer of 768 elements");
  EXPECT_EQ(message_of<InvalidArgument>([&] { (void)layout.locate(768); }),
            "element 768 lies outside the flat buffer of 768 elements");
  EXPECT_THAT(message_of<InvalidArgument>([&] { (void)layout.locate(-1); }),
              HasSubstr("element -1 lies outside"));
  EXPECT_EQ(message_of<InvalidArgument>([&] { (void)bucket_ranges(layout, 0); }),
            "bucket of 0 elements; at least 1 is needed");
  EXPECT_EQ(message_of<InvalidArgument>([&] { (void)overlaps(layout, layout_of({10}, 3), 0); }),
            "layouts of different tensors cannot overlap: one has 2 tensors, the other 1");
  EXPECT_EQ(
      message_of<InvalidArgument>([&] {
        (void)overlaps(layout, layout_of({10, 301}, 3), 0);
      }),
      "layouts of different tensors cannot overlap: tensor 1 has 300 elements in one, 301 in the other");
  EXPECT_EQ(message_of<InvalidArgument>([&] {
              (void)overlaps(layout, layout_of({10, 300}, 4), 4);
            }),
            "flat layout is over 4 ranks; there is no rank 4");

  const std::string too_many =
      " ranks would pass 1152921504606846975 elements; split the unit in smaller ones";
  EXPECT_EQ(message_of<InvalidArgument>([] { layout_of({max64}, 1); }),
            "flat buffer of 1 tensors over 1" + too_many);
  EXPECT_EQ(message_of<InvalidArgument>([] {
              layout_of({max64 / 16, max64 / 16, max64 / 16}, 2);
            }),
            "flat buffer of 3 tensors over 2" + too_many);
  // The size is valid, but not when it is rounded up to whole shards.
  EXPECT_EQ(message_of<InvalidArgument>([] { layout_of({max64 / 8}, 1); }),
            "flat buffer of 1 tensors over 1" + too_many);
  EXPECT_EQ(message_of<InvalidArgument>([] { layout_of({max64 / 8 - 300}, 2147483647); }),
            "flat buffer of 1 tensors over 2147483647" + too_many);
  const std::int64_t largest = max64 / 8 / 256 * 256;
  EXPECT_EQ(layout_of({largest}, 1).padded_elements(), largest);
}

TEST(Overlaps, FromThreeRanksToTwo) {
  const std::vector<std::int64_t> sizes{10, 300, 256};  // at 0, 64, 384; ends at 640
  const FlatLayout from = layout_of(sizes, 3);          // shards of 256
  const FlatLayout to = layout_of(sizes, 2);            // shards of 512
  EXPECT_THAT(overlaps(from, to, 0),
              ElementsAre(OverlapPiece{0, 0, 0, 10}, OverlapPiece{0, 64, 64, 192},
                          OverlapPiece{1, 0, 256, 108}, OverlapPiece{1, 128, 384, 128}));
  EXPECT_THAT(overlaps(from, to, 1), ElementsAre(OverlapPiece{2, 0, 0, 128}));
}

TEST(Overlaps, NeighbouringTensorsWithoutPaddingAreOnePiece) {
  const std::vector<std::int64_t> sizes{64, 128, 320, 64};
  EXPECT_THAT(overlaps(layout_of(sizes, 1), layout_of(sizes, 1), 0), ElementsAre(OverlapPiece{0, 0, 0, 576}));
  EXPECT_THAT(overlaps(layout_of(sizes, 1), layout_of(sizes, 2), 0), ElementsAre(OverlapPiece{0, 0, 0, 512}));
  EXPECT_THAT(
      overlaps(layout_of(sizes, 3), layout_of(sizes, 1), 0),
      ElementsAre(OverlapPiece{0, 0, 0, 256}, OverlapPiece{1, 0, 256, 256}, OverlapPiece{2, 0, 512, 64}));
}

TEST(Overlaps, RanksThatOwnNothingReadNothing) {
  const std::vector<std::int64_t> sizes{3};
  const FlatLayout from = layout_of(sizes, 2);
  const FlatLayout to = layout_of(sizes, 8);
  EXPECT_THAT(overlaps(from, to, 0), ElementsAre(OverlapPiece{0, 0, 0, 3}));
  for (int rank = 1; rank < 8; ++rank) EXPECT_THAT(overlaps(from, to, rank), IsEmpty()) << rank;
}

TEST(Buckets, CutsTheShardInMultiplesOf256) {
  const FlatLayout layout = layout_of({5000}, 2);  // shards of 2560
  ASSERT_EQ(layout.shard_elements(), 2560);
  EXPECT_THAT(bucket_ranges(layout, 2048),
              ElementsAre(ElementRange{0, 1024}, ElementRange{1024, 2048}, ElementRange{2048, 2560}));
  EXPECT_THAT(bucket_ranges(layout, 2047), testing::SizeIs(4));  // 1023 rounds down to 768
  EXPECT_THAT(bucket_ranges(layout, 1), testing::SizeIs(10));    // the least is 256
  EXPECT_THAT(bucket_ranges(layout, 5120), ElementsAre(ElementRange{0, 2560}));
  EXPECT_THAT(bucket_ranges(layout, std::numeric_limits<std::int64_t>::max()),
              ElementsAre(ElementRange{0, 2560}));
}

}  // namespace
}  // namespace tranche
