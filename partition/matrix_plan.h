#pragma once
/// Assigns matrices to ranks if shards cut matrices and an update needs whole ones.

#include <cstdint>
#include <span>
#include <vector>

namespace tranche::detail {

/// A matrix, or several that one rank computes in sequence.
struct MatrixJob {
  double operations = 0;
  std::vector<std::int64_t> held;  ///< the number of its elements that each rank holds
};

/// Returns the rank that computes each job; a pure function. Jobs are assigned in descending order of
/// operations (longest processing time first). A first plan gives each job to the rank with the least load;
/// its largest load is the limit of the second plan, which gives a job to the rank that holds most of it.
/// Throws InvalidArgument unless every job has an entry for each of `ranks` ranks.
std::vector<int> plan_matrices(std::span<const MatrixJob> jobs, int ranks);

/// The largest load of a rank divided by the mean; 1 if there are no jobs.
double matrix_load_ratio(std::span<const MatrixJob> jobs, std::span<const int> owners, int ranks);

}  // namespace tranche::detail
