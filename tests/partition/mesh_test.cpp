#include "tranche/partition/mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "tranche/core/error.h"

namespace tranche {
namespace {

using enum MeshAxis;

std::string refusal(std::string_view text, int ranks) {
  try {
    (void)Mesh::parse(text, ranks);
  } catch (const ConfigurationError& error) {
    return error.message();
  }
  return "accepted";
}

TEST(Mesh, WithoutTextAllRanksShard) {
  for (const int ranks : {1, 2, 7}) {
    const Mesh mesh = Mesh::parse(" ", ranks);
    EXPECT_EQ(mesh, Mesh(ranks));
    EXPECT_EQ(mesh, Mesh::parse("shard=*", ranks));
    EXPECT_EQ(mesh.size(shard), ranks);
    EXPECT_EQ(mesh.to_string(), "shard=" + std::to_string(ranks));
    EXPECT_EQ(mesh.describe(ranks - 1), "");
    EXPECT_EQ(mesh.data_ranks(), ranks);
  }
}

TEST(Mesh, TheLastAxisIsOfNeighbours) {
  const Mesh mesh = Mesh::parse("replicate=2, shard=3", 6);
  EXPECT_EQ(mesh.group({shard}, 4), (std::vector{3, 4, 5}));
  EXPECT_EQ(mesh.group({replicate}, 4), (std::vector{1, 4}));
  EXPECT_EQ(mesh.group({replicate, shard}, 4), (std::vector{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(mesh.group({pipeline}, 4), (std::vector{4}));
  EXPECT_EQ(mesh.coordinate(replicate, 4), 1);
  EXPECT_EQ(mesh.coordinate(shard, 4), 1);
  EXPECT_EQ(mesh.coordinate(tensor, 4), 0);
  EXPECT_EQ(mesh.describe(5), "replicate 1, shard 2");
  EXPECT_EQ(mesh.name_of_rank(5), "rank 5 (replicate 1, shard 2)");
  EXPECT_EQ(Mesh(6).name_of_rank(5), "rank 5");
  const Mesh strided = Mesh::parse("shard=3, replicate=2", 6);
  EXPECT_EQ(strided.group({shard}, 4), (std::vector{0, 2, 4}));
  EXPECT_EQ(strided.group({replicate}, 4), (std::vector{4, 5}));
  EXPECT_EQ(strided.to_string(), "shard=3, replicate=2");
  EXPECT_NE(strided, mesh);
}

TEST(Mesh, GroupsOfAnAxisCoverTheRanksOnce) {
  for (int ranks = 1; ranks <= 12; ++ranks) {
    for (int k = 1; k <= ranks; ++k) {
      if (ranks % k != 0) continue;
      const Mesh mesh = Mesh::parse("replicate=*,shard=" + std::to_string(k), ranks);
      EXPECT_EQ(mesh.size(replicate), ranks / k);
      EXPECT_EQ(mesh.data_ranks(), ranks);
      for (const MeshAxis axis : {replicate, shard}) {
        std::vector<int> seen(static_cast<std::size_t>(ranks), 0);
        for (int rank = 0; rank < ranks; ++rank) {
          const std::vector<int> group = mesh.group({axis}, rank);
          ASSERT_EQ(static_cast<int>(group.size()), mesh.size(axis));
          ASSERT_EQ(group[static_cast<std::size_t>(mesh.coordinate(axis, rank))], rank);
          if (group.front() == rank) {
            for (const int member : group) ++seen[static_cast<std::size_t>(member)];
          }
        }
        EXPECT_EQ(std::accumulate(seen.begin(), seen.end(), 0), ranks);
        EXPECT_EQ(*std::max_element(seen.begin(), seen.end()), 1);
      }
    }
  }
}

TEST(Mesh, WhatIsRefusedNamesTheAxisAndTheArithmetic) {
  for (const char* text : {"shard=*,", ",shard=*", "replicate=2,,shard=*", ","}) {
    EXPECT_EQ(refusal(text, 8), "mesh \"" + std::string(text) +
                                    "\": there is no axis on one side of a comma; axes with sizes are "
                                    "expected, such as \"replicate=2, shard=*\"");
  }
  EXPECT_EQ(refusal("replicate=3, shard=*", 8),
            "mesh \"replicate=3, shard=*\": replicate 3 does not divide the 8 ranks, so shard cannot take "
            "the rest; the closest mesh of 8 ranks is \"replicate=4, shard=*\"");
  EXPECT_EQ(refusal("replicate=2, shard=3", 8),
            "mesh \"replicate=2, shard=3\": replicate 2 x shard 3 is 6, but there are 8 ranks; give one axis "
            "the size * to take the rest; the closest mesh of 8 ranks is \"replicate=2, shard=4\"");
  EXPECT_EQ(refusal("shard=4", 1),
            "mesh \"shard=4\": shard 4, but there is 1 rank; give one axis the size * to take "
            "the rest; the closest mesh of 1 rank is \"shard=1\"");
  EXPECT_EQ(
      refusal("replicate=2000000000, shard=2000000000", 8),
      "mesh \"replicate=2000000000, shard=2000000000\": replicate 2000000000 x shard 2000000000 is "
      "more than 8, "
      "but there are 8 ranks; give one axis the size * to take the rest; the closest mesh of 8 ranks is "
      "\"replicate=1, shard=8\"");
  EXPECT_EQ(
      refusal("tensor=2, pipeline=2", 8),
      "mesh \"tensor=2, pipeline=2\": tensor 2 x pipeline 2 is 4, but there are 8 ranks; add shard=* to "
      "take the rest: \"shard=*, tensor=2, pipeline=2\"");
  EXPECT_THAT(refusal("pipeline=2, tensor=2, replicate=2", 64),
              testing::EndsWith("to take the rest: \"pipeline=2, shard=*, tensor=2, replicate=2\""));
  EXPECT_THAT(refusal("pipeline=3, tensor=2", 8), testing::HasSubstr("give one axis the size *"));
  EXPECT_THAT(refusal("replicate=2", 8), testing::EndsWith("to take the rest: \"replicate=2, shard=*\""));
  EXPECT_THAT(refusal("pipeline=3, shard=5, tensor=2", 32),
              testing::HasSubstr("; the closest mesh of 32 ranks is \"pipeline=4, shard=4, tensor=2\""));
  EXPECT_EQ(refusal("search", 8),
            "mesh \"search\": tranche plan --fit SIZE searches a mesh; name the axes that it finds");
  EXPECT_EQ(refusal("replicate=*, shard=*", 8),
            "mesh \"replicate=*, shard=*\": both replicate and shard are *; one axis at most can take what "
            "the others "
            "leave");
  EXPECT_EQ(refusal("shard=2, shard=4", 8), "mesh \"shard=2, shard=4\": axis shard is named twice");
  EXPECT_EQ(refusal("shart=8", 8), "mesh \"shart=8\": there is no axis 'shart'; the closest is shard");
  EXPECT_EQ(refusal("x=8", 8),
            "mesh \"x=8\": there is no axis 'x'; the axes are replicate, pipeline, shard, context, tensor");
  for (const std::string_view size : {"0", "-2", "2.5", "", "two", "99999999999999999999"}) {
    EXPECT_EQ(refusal("shard=" + std::string(size), 8), "mesh \"shard=" + std::string(size) +
                                                            "\": the size of shard is '" + std::string(size) +
                                                            "'; it has to be 1 or more, or *");
  }
  EXPECT_EQ(
      refusal("shard", 8),
      "mesh \"shard\": 'shard' has no size; axes with sizes are expected, such as \"replicate=2, shard=*\"");
  EXPECT_EQ(refusal("pipeline=2, shard=*, context=2, tensor=2", 8), "accepted");
}

TEST(Mesh, RanksThatSeeTheSameSamplesHaveOneDataRank) {
  const Mesh today = Mesh::parse("shard=3, replicate=2", 6);
  for (int rank = 0; rank < 6; ++rank) EXPECT_EQ(today.data_rank(rank), rank);
  const Mesh mesh = Mesh::parse("replicate=2, pipeline=2, shard=3, tensor=2", 24);
  EXPECT_EQ(mesh.data_ranks(), 6);
  for (int rank = 0; rank < 24; ++rank) {
    EXPECT_EQ(mesh.data_rank(rank), mesh.coordinate(replicate, rank) * 3 + mesh.coordinate(shard, rank));
  }
}

TEST(Mesh, RanksOfShardAndContextShareState) {
  for (const char* text : {"shard=2, context=3, tensor=2", "context=3, tensor=2, shard=2",
                           "tensor=2, shard=6", "context=6, tensor=2", "shard=*"}) {
    const Mesh mesh = Mesh::parse(text, 12);
    for (int rank = 0; rank < 12; ++rank) {
      const std::vector<int> group = mesh.group({shard, MeshAxis::context}, rank);
      EXPECT_EQ(static_cast<int>(group.size()), mesh.state_ranks()) << text;
      EXPECT_EQ(group[static_cast<std::size_t>(mesh.state_rank(rank))], rank) << text;
    }
    EXPECT_EQ(mesh.data_ranks(), mesh.size(shard));
    EXPECT_EQ(mesh.token_ranks(), mesh.state_ranks());
  }
}

TEST(Mesh, RanksOfReplicateShardAndContextHavePromptsOfTheirOwn) {
  const Mesh mesh = Mesh::parse("context=2, pipeline=2, replicate=2, shard=2", 16);
  EXPECT_EQ(mesh.data_ranks(), 4);
  EXPECT_EQ(mesh.token_ranks(), 8);
  for (int rank = 0; rank < 16; ++rank) {
    EXPECT_EQ(mesh.token_rank(rank), rank / 8 * 4 + rank % 4);
    EXPECT_EQ(mesh.data_rank(rank), rank % 4);
  }
}

TEST(Mesh, RanksThatAreNotThere) {
  EXPECT_THROW(Mesh(0), InvalidArgument);
  const Mesh mesh(3);
  EXPECT_THROW((void)mesh.coordinate(shard, 3), InvalidArgument);
  EXPECT_THROW((void)mesh.group({shard}, -1), InvalidArgument);
  EXPECT_THROW((void)mesh.describe(3), InvalidArgument);
}

}  // namespace
}  // namespace tranche
