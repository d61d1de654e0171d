#include "tools/nodes.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include "tranche/comm/backends.h"

namespace tranche::tools {
namespace {

using testing::ElementsAre;

TEST(Nodes, AreFoundWithTheirRanksAndAddUpWhatTheseSent) {
  run_thread_ranks(5, [](int rank, const CommunicatorFactory& factory) {
    CommunicatorOptions options;
    options.local_size = 2;
    const auto all = factory(options);
    std::vector<RanksOfNode> nodes = nodes_of(*all);
    ASSERT_EQ(nodes.size(), 3u);
    EXPECT_THAT(nodes[0].ranks, ElementsAre(0, 1));
    EXPECT_THAT(nodes[2].ranks, ElementsAre(4));
    EXPECT_FALSE(nodes[0].name.empty());
    EXPECT_EQ(describe(nodes), "3 (2 + 2 + 1 ranks)");
    // Rank 4 has no value, so its node has none.
    share_node_bytes(*all, rank == 4 ? std::nullopt : std::optional<std::int64_t>(10 + rank), nodes);
    EXPECT_EQ(nodes[0].bytes_to_other_nodes, 21);
    EXPECT_EQ(nodes[1].bytes_to_other_nodes, 25);
    EXPECT_EQ(nodes[2].bytes_to_other_nodes, std::nullopt);
  });
}

TEST(Nodes, DataToOtherNodesIsCountedAndNothingElse) {
  run_thread_ranks(4, [](int rank, const CommunicatorFactory& factory) {
    CommunicatorOptions options;
    options.local_size = 2;
    const auto all = factory(options);
    const auto send = [&](int from, int to, Traffic traffic) {
      std::vector<float> values(100);
      const OperationLabel label{"test", "", traffic};
      if (rank == from) all->send(values.data(), 100, DataType::float32, to, {}, label).wait();
      if (rank == to) all->recv(values.data(), 100, DataType::float32, from, {}, label).wait();
    };
    send(0, 1, Traffic::data);  // from one node
    send(1, 3, Traffic::data);
    send(2, 0, Traffic::control);
    EXPECT_EQ(all->meter().total(Traffic::data).to_other_nodes, rank == 1 ? 400 : 0);
  });
}

TEST(Nodes, AreDescribedShortly) {
  const auto text = [](const std::vector<int>& counts) {
    std::vector<RanksOfNode> nodes;
    for (const int count : counts) nodes.push_back({"n", std::vector<int>(static_cast<std::size_t>(count))});
    return describe(nodes);
  };
  EXPECT_EQ(text({1}), "1 (1 rank)");
  EXPECT_EQ(text({4}), "1 (4 ranks)");
  EXPECT_EQ(text({3, 1}), "2 (3 + 1 ranks)");
  EXPECT_EQ(text(std::vector<int>(16, 8)), "16 (8 ranks each)");
  EXPECT_EQ(text(std::vector<int>(16, 1)), "16 (1 rank each)");
  std::vector<int> uneven(40, 8);
  uneven[7] = 2;
  EXPECT_EQ(text(uneven), "40 (2 to 8 ranks)");
}

}  // namespace
}  // namespace tranche::tools
