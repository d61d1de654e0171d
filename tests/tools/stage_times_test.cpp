#include "tools/train/stage_times.h"

#include <gmock/gmock.h>

#include "tranche/comm/backends.h"

namespace tranche::tools {
namespace {

StepResult step(double seconds, double waited) {
  StepResult result;
  result.seconds = seconds;
  result.exposed_message_seconds = waited;
  return result;
}

TEST(StageTimes, AreSumsOverTheRanksOfAStage) {
  const Mesh mesh = Mesh::parse("shard=2, pipeline=2", 4);
  run_thread_ranks(4, [&](int rank, const CommunicatorFactory& factory) {
    const auto ranks = factory({});
    StageTimes times;
    EXPECT_EQ(times.by_stage(*ranks, mesh)[0].idle_share(), 0) << "of no steps";
    // Ranks 0 and 2 are stage 0.
    const double waited = rank == 0 ? 0.5 : rank == 2 ? 1.5 : 0.25;
    times.add(step(2, 2));
    const std::vector<StageTime> first = times.by_stage(*ranks, mesh);
    EXPECT_EQ(first[1].idle_share(), 1) << "planning steps count where there are no others";
    times.add(step(2, 2));
    times.add(step(4, waited));
    times.add(step(4, waited));
    const std::vector<StageTime> stages = times.by_stage(*ranks, mesh);
    ASSERT_EQ(stages.size(), 2u);
    EXPECT_EQ(stages[0].waited, 4);
    EXPECT_EQ(stages[0].seconds, 16);
    EXPECT_EQ(stages[1].idle_share(), 0.0625);
    EXPECT_EQ(
        idle_line(stages, mesh),
        "waiting for messages of other stages: 6.2% of a step on stage 1, the slowest, to 25.0% on stage 0, "
        "the fastest\n");
    // A stage also waits for the rows of its own layers.
    EXPECT_THAT(idle_line(stages, Mesh::parse("pipeline=2, tensor=2", 4)),
                testing::StartsWith("waiting for messages of other stages and of ranks of tensor: 6.2% of a "
                                    "step on stage 1, the slowest"));
    EXPECT_THAT(idle_line(stages, Mesh::parse("pipeline=2, context=2", 4)),
                testing::StartsWith("waiting for messages of other stages and of ranks of context: 6.2%"));
    EXPECT_THAT(
        idle_line(stages, Mesh::parse("pipeline=2, context=2, tensor=2", 8)),
        testing::StartsWith("waiting for messages of other stages and of ranks of context and tensor: 6.2%"));
    EXPECT_TRUE(times.by_stage(*ranks, Mesh(4)).empty());
  });
}

}  // namespace
}  // namespace tranche::tools
