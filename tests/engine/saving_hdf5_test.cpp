// HDF5 fails while rank 0 makes a checkpoint's model.h5.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "on_ranks.h"
#include "saving_fixture.h"
#include "tests/checkpoint/failing_hdf5.h"

namespace tranche::test {
namespace {

using ::testing::HasSubstr;

TEST_F(Saving, FailsOnEveryRankIfHdf5FailsOnRank0) {
  OddRun run;
  run.ranks = 2;
  run.stage = 2;
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    odd_micro_batch(engine, runtime.rank() * run.samples_per_micro_batch, run.samples_per_micro_batch);
    (void)engine.step();
    std::optional<testing::FailingHdf5> failing;
    if (runtime.rank() == 0) failing.emplace("H5Pset_virtual", 1);  // only rank 0 makes model.h5
    EXPECT_THAT(message_of<CheckpointError>([&] { engine.save(path(), {.wait = true}); }),
                ::testing::AllOf(HasSubstr("cannot save step 1 to " + path()), HasSubstr("rank 0: "),
                                 HasSubstr("HDF5 cannot describe weights/"), HasSubstr(" in model.h5: ")))
        << "rank " << runtime.rank();
    EXPECT_TRUE(!failing || failing->refused());
    failing.reset();
    engine.save(path(), {.wait = true});
    EXPECT_EQ(engine.load(path()).step, 1) << "the next save is made as if nothing had failed";
  });
}

}  // namespace
}  // namespace tranche::test
