#pragma once
/// Which rank computes which matrix, where shards cut matrices and an update needs them whole.

#include <cstdint>
#include <span>
#include <vector>

namespace tranche::detail {

/// A matrix, or several that one rank computes one after the other.
struct MatrixJob {
  double operations = 0;
  std::vector<std::int64_t> held;  ///< elements of it that each rank holds
};

/// The rank that computes each job; a pure function. Jobs are taken in descending order of operations
/// (longest processing time first). The greatest load of a rank is that of the plan in which each goes to the
/// rank with the least; within that bound a job goes to the rank that holds most of it. Throws
/// InvalidArgument unless every job says of each of `ranks` ranks what it holds.
std::vector<int> plan_matrices(std::span<const MatrixJob> jobs, int ranks);

/// The greatest load of a rank over the mean; 1 where there is nothing to do.
double matrix_load_ratio(std::span<const MatrixJob> jobs, std::span<const int> owners, int ranks);

}  // namespace tranche::detail
