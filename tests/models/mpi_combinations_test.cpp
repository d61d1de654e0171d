// The covering array of trainings under mpirun: each world runs the rows with as many ranks, and compares
// with the bits of thread ranks at stage 0. A part of the sweep has its share of each world's rows.

#include <gtest/gtest.h>

#include "combination_checks.h"
#include "tests/comm/mpi_folder.h"
#include "tests/core/rounds.h"
#include "tranche/comm/mpi.h"

namespace tranche::models {
namespace {

TEST(MpiCombinations, HaveTheBitsOfThreadRanks) {
  Communicator& world = test::world();
  const std::vector<CombinationAxis> axes = combination_axes();
  const std::vector<test::CoveringRow> rows = rows_of_few_ranks(axes, 8);
  expect_pairs_of_the_table("MpiCombinations.HaveTheBitsOfThreadRanks", axes, rows, {"cpu", "mpi"});
  int met = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    Combination whole = combination_of(axes, rows[i]);
    if (whole.ranks != world.size() || !test::swept(met++)) continue;
    SCOPED_TRACE("row " + std::to_string(i) + ": " + text_of(axes, rows[i]));
    Combination plain = plain_combination_of(axes, rows[i]);
    plain.evaluate = whole.evaluate;
    plain.generate = whole.generate;
    // mpirun has started a fixed number of ranks; program.checkpoints_resume tests other numbers.
    for (Combination* c : {&whole, &plain}) {
      if (c->continued == Continued::by_other_ranks) c->continued = Continued::at_another_stage;
    }
    const test::MpiFolder folder;
    CombinationOutcome expected;
    if (world.rank() == 0) expected = train_combination(plain, {.folder = folder.path() + "/plain"}, true);
    for (const bool inline_progress : {false, true}) {
      SCOPED_TRACE(inline_progress ? "inline progress" : "a thread for progress");
      whole.config.inline_progress = inline_progress;
      CombinationPlace place;
      place.folder = folder.path() + (inline_progress ? "/inline" : "/thread");
      place.on_ranks = [&](int, const std::function<void(int, const CommunicatorFactory&)>& body) {
        if (inline_progress) {
          body(world.rank(), adopting(MPI_COMM_WORLD));
        } else {
          body(world.rank(),
               [](const CommunicatorOptions& options) { return make_mpi_communicator(options); });
        }
      };
      const CombinationOutcome actual = train_combination(whole, place);
      if (world.rank() == 0) expect_same(expected, actual, whole);
    }
  }
  EXPECT_GT(met, 0);
}

}  // namespace
}  // namespace tranche::models
