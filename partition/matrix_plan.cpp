#include "partition/matrix_plan.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "tranche/core/error.h"

namespace tranche::detail {

namespace {

/// Assigns each job to the best rank with room for it.
class Assignment {
 public:
  Assignment(std::span<const MatrixJob> jobs, std::span<const std::size_t> order, int ranks)
      : jobs_(jobs), order_(order), loads_(static_cast<std::size_t>(ranks)), owners_(jobs.size()) {}

  /// Assigns all jobs. `most` limits a rank's load as long as one has room; 0: only the least loaded ranks
  /// get jobs.
  std::vector<int> run(double most) {
    for (const std::size_t j : order_) {
      const MatrixJob& job = jobs_[j];
      const double least = *std::min_element(loads_.begin(), loads_.end());
      const double bound = std::max(least, most - job.operations);
      std::size_t best = loads_.size();
      for (std::size_t r = 0; r < loads_.size(); ++r) {
        if (loads_[r] > bound) continue;
        const bool better = best == loads_.size() || job.held[r] > job.held[best] ||
                            (job.held[r] == job.held[best] && loads_[r] < loads_[best]);
        if (better) best = r;
      }
      loads_[best] += job.operations;
      owners_[j] = static_cast<int>(best);
    }
    return owners_;
  }
  double greatest() const { return *std::max_element(loads_.begin(), loads_.end()); }

 private:
  std::span<const MatrixJob> jobs_;
  std::span<const std::size_t> order_;
  std::vector<double> loads_;
  std::vector<int> owners_;
};

}  // namespace

std::vector<int> plan_matrices(std::span<const MatrixJob> jobs, int ranks) {
  for (const MatrixJob& job : jobs) {
    if (ranks >= 1 && static_cast<int>(job.held.size()) == ranks) continue;
    throw InvalidArgument("a plan of matrices over " + std::to_string(ranks) + " ranks has a job that " +
                          std::to_string(job.held.size()) + " ranks hold");
  }
  std::vector<std::size_t> order(jobs.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return jobs[a].operations > jobs[b].operations; });
  Assignment even(jobs, order, ranks);
  std::vector<int> owners = even.run(0);
  Assignment near(jobs, order, ranks);
  std::vector<int> nearer = near.run(even.greatest());
  return near.greatest() <= even.greatest() ? nearer : owners;
}

double matrix_load_ratio(std::span<const MatrixJob> jobs, std::span<const int> owners, int ranks) {
  std::vector<double> loads(static_cast<std::size_t>(ranks));
  double all = 0;
  for (std::size_t j = 0; j < jobs.size(); ++j) {
    loads[static_cast<std::size_t>(owners[j])] += jobs[j].operations;
    all += jobs[j].operations;
  }
  return all == 0 ? 1 : *std::max_element(loads.begin(), loads.end()) * ranks / all;
}

}  // namespace tranche::detail
