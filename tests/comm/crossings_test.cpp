// Compares the bytes to other nodes, counted when calls are issued, with the messages of the transport.
#include "comm/node/crossings.h"

#include <gtest/gtest.h>

#include <utility>

namespace tranche::comm {
namespace {

constexpr std::int64_t large = 1 << 20;  // elements; too many to be sent as a message

TEST(Crossings, PartsAndSumsCrossOnceForANodeWhereItsRanksReadEachOther) {
  const Crossings pairs(NodeLayout({0, 0, 1, 1}), 1, NodeCollectives::automatic, true);
  const Crossings::Bytes gathered = pairs.all_gather(large, DataType::bfloat16);
  EXPECT_EQ(gathered.own, large * 2) << "to one rank of the other node, for both";
  EXPECT_EQ(gathered.node, large * 4);
  ReductionOptions options;
  options.group_size = 2;
  const Crossings::Bytes summed = pairs.reduce_scatter(large, DataType::bfloat16, options);
  EXPECT_EQ(summed.own, large * 4) << "a sum of the node in fp32, for the rank that it stands for";
  EXPECT_EQ(summed.node, large * 8);
  options.group_size = 4;  // Groups span both nodes, so each rank sends all its data to each rank of the
                           // other node.
  EXPECT_EQ(pairs.reduce_scatter(large, DataType::bfloat16, options).node, 2 * 2 * large * 2);
}

TEST(Crossings, MessagesGoToEveryRankElsewhere) {
  for (const auto& [collectives, windows] :
       {std::pair(NodeCollectives::messages, true), std::pair(NodeCollectives::automatic, false)}) {
    const Crossings each(NodeLayout({0, 0, 1, 1}), 0, collectives, windows);
    EXPECT_EQ(each.all_gather(large, DataType::bfloat16).own, 2 * large * 2);
    EXPECT_EQ(each.reduce_scatter(large, DataType::bfloat16, {}).node, 2 * 2 * large * 2);
  }
  const Crossings small(NodeLayout({0, 0, 1, 1}), 0, NodeCollectives::automatic, true);
  EXPECT_EQ(small.all_gather(8, DataType::float32).own, 2 * 8 * 4) << "few bytes go by messages";
  ReductionOptions two;
  two.givers = 1;
  EXPECT_EQ(small.reduce_scatter(8, DataType::float32, two).node, 2 * 8 * 4) << "of one giver";
}

TEST(Crossings, UnevenNodesAndOneNode) {
  const Crossings uneven(NodeLayout({0, 0, 0, 1}), 0, NodeCollectives::automatic, true);
  EXPECT_EQ(uneven.all_gather(large, DataType::float32).node, 3 * large * 4);
  EXPECT_TRUE(uneven.elsewhere(3));
  EXPECT_FALSE(uneven.elsewhere(2));
  const Crossings alone(NodeLayout({0, 0, 0, 0}), 0, NodeCollectives::automatic, true);
  EXPECT_EQ(alone.all_gather(large, DataType::float32).node, 0);
  EXPECT_EQ(alone.to_all(large).own, 0);
}

}  // namespace
}  // namespace tranche::comm
