// Placements of drawn models on drawn meshes: every element has one place and one owner.

#include "partition/placement.h"

#include <gmock/gmock.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tests/core/error_text.h"
#include "tranche/core/error.h"

namespace tranche::detail {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

/// Two units; the second has a frozen tensor between tensors of two classes.
Placement two_units(const std::string& mesh, int ranks) {
  return {Mesh::parse(mesh, ranks),
          2,
          {{Shape{10}, 0}, {Shape{300}, 0}, {Shape{7, 9}, 1}, {Shape{5}, 1, true}, {Shape{64}, 1, false, 1}},
          {true, false}};
}

TEST(Placement, NumbersBuffersByUnitAndClass) {
  const Placement placement = two_units("shard=3", 3);
  EXPECT_EQ(placement.state_classes(), 2);
  ASSERT_EQ(placement.buffers().size(), 6u);
  EXPECT_THAT(placement.buffer(0).tensors, ElementsAre(0, 1));
  EXPECT_TRUE(placement.buffer(1).empty());
  EXPECT_TRUE(placement.buffer(2).empty());
  EXPECT_THAT(placement.buffer(3).tensors, ElementsAre(2));
  EXPECT_THAT(placement.buffer(4).tensors, ElementsAre(4));
  EXPECT_THAT(placement.buffer(5).tensors, ElementsAre(3));
  EXPECT_TRUE(placement.buffer(5).frozen);
  EXPECT_EQ(placement.buffer_of(4), placement.first_buffer(1) + 1);
  EXPECT_EQ(placement.index_in_buffer(1), 1);
  EXPECT_EQ(&placement.buffers_of_unit(1)[2], &placement.buffer(5));
  // The states of the first class are in blocks, so the second tensor starts at a block.
  EXPECT_EQ(placement.buffer(0).layout(0).tensor_offset(1), 256);
  EXPECT_EQ(placement.buffer(0).layout(0).padded_elements(), 768);
  EXPECT_EQ(placement.padded_elements(), 4 * 768);
  EXPECT_THAT(placement.box(2, 0), ElementsAre(Slice{0, 7, 1, 7}, Slice{0, 9, 1, 9}));
}

TEST(Placement, OfReplicasGivesEachAnEqualPartOfTheShard) {
  const Placement placement = two_units("replicate=2, shard=2", 4);
  EXPECT_THAT(placement.group(0, 1), ElementsAre(0, 1));
  EXPECT_THAT(placement.replicas(0, 1), ElementsAre(1, 3));
  EXPECT_THAT(placement.owners(0), ElementsAre(0, 2, 1, 3)) << "shard by shard";
  EXPECT_EQ(placement.shard(0, 1), placement.shard(0, 3));
  EXPECT_EQ(placement.owned(0, 1), (ElementRange{512, 768}));
  EXPECT_EQ(placement.owned(0, 3), (ElementRange{768, 1024}));
}

// Ranks 0 1 | 2 3 are the stages of the first replica, 4 5 | 6 7 those of the second.
TEST(Placement, SharesTiedTensorsAmongTheStagesThatHoldThem) {
  const Placement placement(Mesh::parse("replicate=2, pipeline=2, shard=2", 8), 2,
                            {{Shape{100}, 0, false, 0, {0, 1}},
                             {Shape{10}, 0},
                             {Shape{20}, 0, false, 0, {1}},
                             {Shape{30}, 1, false, 0, {1}}},
                            {false});
  ASSERT_EQ(placement.buffers().size(), 2u * 3 + 2) << "a class and frozen tensors for each set of stages";
  EXPECT_EQ(placement.first_buffer(1), 6);
  EXPECT_THAT(placement.buffer(0).stages, ElementsAre(0, 1));
  EXPECT_EQ(placement.buffer_of(1), 2);
  EXPECT_EQ(placement.buffer_of(2), 4);
  EXPECT_TRUE(placement.holds(2, 1));
  EXPECT_FALSE(placement.holds(2, 2));
  EXPECT_THAT(placement.group(0, 6), ElementsAre(4, 6, 5, 7)) << "by data rank, and within it by stage";
  EXPECT_THAT(placement.group(4, 7), ElementsAre(6, 7));
  EXPECT_THAT(placement.replicas(0, 6), ElementsAre(2, 6));
  EXPECT_THAT(placement.owners(0), ElementsAre(0, 4, 2, 6, 1, 5, 3, 7));
  EXPECT_THAT(placement.owners(6), ElementsAre(2, 6, 3, 7));
  EXPECT_EQ(placement.class_of(5), 0);
  EXPECT_EQ(placement.class_of(7), 2);
  EXPECT_EQ(placement.buffer(0).layout(0).ranks(), 4);
  EXPECT_EQ(placement.shard(0, 1).begin, 2 * placement.buffer(0).layout(0).shard_elements());
  const auto refused = [&] { (void)placement.shard(2, 3); };
  EXPECT_EQ(test::message_of<InvalidArgument>(refused),
            "rank 3 (replicate 0, pipeline 1, shard 1) does not hold buffer 2");
}

// Ranks 0 1 2 3 are the first replica: neighbours differ on tensor.
TEST(Placement, DividesBuffersByTheRanksOfTensorThatHoldEqualValues) {
  const Placement placement(Mesh::parse("replicate=2, shard=1, tensor=4", 8), 1,
                            {{Shape{100}, 0},
                             {.shape = Shape{10, 9}, .cut = {1, 1, 1}},
                             {.shape = Shape{6, 4}, .cut = {0, 1, 3}},
                             {.shape = Shape{8}, .frozen = true, .cut = {0, 1, 2}}},
                            {false});
  ASSERT_EQ(placement.buffers().size(), 3u * 2) << "a class and frozen tensors for each number of sharers";
  EXPECT_EQ(placement.buffer(0).sharers, 4);
  EXPECT_EQ(placement.buffer(0).parts(), 1);
  EXPECT_THAT(placement.group(0, 6), ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(placement.owners(0), ElementsAre(0, 4, 1, 5, 2, 6, 3, 7));
  EXPECT_EQ(placement.buffer(2).sharers, 1);
  EXPECT_THAT(placement.group(2, 6), ElementsAre(6));
  EXPECT_EQ(placement.layout(2, 1).elements(), 20) << "columns 2 and 3";
  EXPECT_EQ(placement.layout(2, 7).elements(), 30) << "the last part has a column more";
  EXPECT_THAT(placement.box(1, 3), ElementsAre(Slice{0, 10, 1, 10}, Slice{6, 3, 1, 3}));
  EXPECT_THAT(placement.owners(2, 3), ElementsAre(3, 7));
  EXPECT_EQ(placement.buffer(4).sharers, 2) << "two grains for four ranks";
  EXPECT_EQ(placement.part_of(4, 6), 1);
  EXPECT_THAT(placement.group(4, 6), ElementsAre(6, 7));
  EXPECT_THAT(placement.owners(4, 1), ElementsAre(2, 6, 3, 7));
  EXPECT_TRUE(placement.buffer(3).frozen);
  EXPECT_EQ(placement.buffer_of(3), 3);
  EXPECT_EQ(placement.class_of(6), 2);
  EXPECT_EQ(placement.padded_elements(), 2048 + 4 * 512 + 2 * 1024 + 4 * 512);
}

TEST(Placement, OwnsEachElementOnce) {
  std::mt19937_64 random(41);
  const auto draw = [&](int least, int most) {
    return std::uniform_int_distribution<int>(least, most)(random);
  };
  for (int round = 0; round < 200; ++round) {
    const int replicas = draw(1, 3), shards = draw(1, 5), units = draw(1, 4), classes = draw(1, 3);
    std::vector<TensorFacts> tensors;
    for (int unit = 0; unit < units; ++unit) {
      for (int t = draw(1, 5); t > 0; --t) {
        const bool frozen = draw(0, 3) == 0;
        tensors.push_back({Shape{draw(1, 40), draw(1, 40)}, unit, frozen, frozen ? 0 : draw(0, classes - 1)});
      }
    }
    std::vector<bool> in_blocks;
    for (int c = 0; c < classes; ++c) in_blocks.push_back(draw(0, 1) == 1);
    const bool replicas_first = draw(0, 1) == 0;
    const std::string mesh =
        replicas_first ? "replicate=" + std::to_string(replicas) + ", shard=" + std::to_string(shards)
                       : "shard=" + std::to_string(shards) + ", replicate=" + std::to_string(replicas);
    const Placement placement(Mesh::parse(mesh, replicas * shards), units, tensors, in_blocks);
    std::vector<int> seen(tensors.size());
    for (int b = 0; b < static_cast<int>(placement.buffers().size()); ++b) {
      const Placement::Buffer& buffer = placement.buffer(b);
      std::int64_t next = 0;
      for (const int rank : placement.owners(b)) {
        const ElementRange owned = placement.owned(b, rank);
        ASSERT_EQ(owned.begin, next) << mesh;
        next = owned.end;
        ASSERT_EQ(intersect(owned, placement.shard(b, rank)), owned) << mesh;
      }
      ASSERT_EQ(next, buffer.layout(0).padded_elements()) << mesh;
      for (std::size_t i = 0; i < buffer.tensors.size(); ++i) {
        const int tensor = buffer.tensors[i];
        ++seen[static_cast<std::size_t>(tensor)];
        ASSERT_EQ(placement.buffer_of(tensor), b);
        ASSERT_EQ(placement.index_in_buffer(tensor), static_cast<int>(i));
        ASSERT_EQ(placement.tensor(tensor).unit, buffer.unit);
        ASSERT_EQ(buffer.layout(0).tensor_elements(static_cast<int>(i)),
                  elements_of(placement.box(tensor, 0)));
      }
    }
    EXPECT_THAT(seen, testing::Each(1));
  }
}

TEST(Placement, RefusesTensorsOfNoUnitOrClass) {
  const auto refusal = [](std::vector<TensorFacts> tensors) {
    return test::message_of<InvalidArgument>([&] { Placement(Mesh(1), 2, std::move(tensors), {false}); });
  };
  EXPECT_THAT(refusal({{Shape{1}, 2}}), HasSubstr("tensor 0 is of unit 2 of 2, which does not follow"));
  EXPECT_THAT(refusal({{Shape{1}, 1}, {Shape{1}, 0}}),
              HasSubstr("tensor 1 is of unit 0 of 2, which does not follow"));
  EXPECT_THAT(refusal({{Shape{1}, 0, false, 1}}), HasSubstr("tensor 0 is of state class 1 of 1"));
  EXPECT_THAT(refusal({{Shape{1}, 0, false, 0, {1}}}), HasSubstr("of stages 1 to 1 of 1"));
  EXPECT_THROW(two_units("shard=2", 2).shard(0, 2), InvalidArgument);
}

}  // namespace
}  // namespace tranche::detail
