#include "partition/matrix_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "partition/flat_layout.h"
#include "tranche/core/error.h"

namespace tranche::detail {
namespace {

/// The hidden matrices of a model with GPT-2's shape; each block is a unit of four tensors.
struct Gpt {
  std::vector<MatrixJob> jobs;
  std::int64_t elements = 0;
  Gpt(std::int64_t width, int blocks, int ranks) {
    struct Tensor {
      std::int64_t rows, columns;
      int matrices;
    };
    const Tensor tensors[] = {
        {width, 3 * width, 3}, {width, width, 1}, {width, 4 * width, 1}, {4 * width, width, 1}};
    std::vector<std::int64_t> sizes;
    for (const Tensor& tensor : tensors) sizes.push_back(tensor.rows * tensor.columns);
    const FlatLayout layout(sizes, ranks);
    for (int block = 0; block < blocks; ++block) {
      for (int t = 0; t < layout.tensors(); ++t) {
        const Tensor& tensor = tensors[t];
        const auto columns = static_cast<double>(tensor.columns / tensor.matrices);
        const double least = std::min(static_cast<double>(tensor.rows), columns);
        const double most = std::max(static_cast<double>(tensor.rows), columns);
        MatrixJob job;
        job.operations = tensor.matrices * (4 * least * least * most + 2 * least * least * least);
        const ElementRange range{layout.tensor_offset(t),
                                 layout.tensor_offset(t) + layout.tensor_elements(t)};
        for (int r = 0; r < ranks; ++r) job.held.push_back(intersect(range, layout.shard_range(r)).size());
        elements += layout.tensor_elements(t);
        jobs.push_back(std::move(job));
      }
    }
  }
};

TEST(MatrixPlan, SharesGpt2OutWithinFivePercentAndSendsLessThanTheBound) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    const Gpt gpt(768, 12, ranks);
    const std::vector<int> owners = plan_matrices(gpt.jobs, ranks);
    EXPECT_LE(matrix_load_ratio(gpt.jobs, owners, ranks), 1.05 + 1e-12) << ranks;
    std::int64_t sent = 0;  // elements that all ranks send to owners and back
    for (std::size_t j = 0; j < gpt.jobs.size(); ++j) {
      for (int r = 0; r < ranks; ++r) {
        if (r != owners[j]) sent += 2 * gpt.jobs[j].held[static_cast<std::size_t>(r)];
      }
    }
    EXPECT_LE(sent * ranks, 2 * gpt.elements * (ranks - 1)) << ranks << ": 2 P (N-1)/N^2 a rank";
  }
}

TEST(MatrixPlan, IsAFunctionOfItsArgumentsAndHonoursLoadBeforePlace) {
  // The large matrix goes to the rank that holds most of it. The small ones go to the ranks with the least
  // work, although rank 0 holds all of them.
  const std::vector<MatrixJob> jobs{{1, {9, 0}}, {1, {9, 0}}, {3, {4, 5}}, {1, {9, 0}}};
  const std::vector<int> owners = plan_matrices(jobs, 2);
  EXPECT_EQ(owners, (std::vector<int>{0, 0, 1, 0}));
  EXPECT_EQ(plan_matrices(jobs, 2), owners);
  EXPECT_EQ(matrix_load_ratio(jobs, owners, 2), 1);
  const std::vector<MatrixJob> alike(6, MatrixJob{1, {0, 7, 0}});
  EXPECT_EQ(matrix_load_ratio(alike, plan_matrices(alike, 3), 3), 1);
  EXPECT_EQ(matrix_load_ratio({}, {}, 3), 1);
}

TEST(MatrixPlan, RefusesJobsOfOtherRanks) {
  const std::vector<MatrixJob> jobs{{1, {1, 2}}};
  try {
    (void)plan_matrices(jobs, 3);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.message(), "a plan of matrices over 3 ranks has a job that 2 ranks hold");
  }
}

}  // namespace
}  // namespace tranche::detail
