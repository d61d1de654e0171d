#pragma once
/// `tranche scale`: runs of this program under mpirun, over ranks and stages, to a table and plots.

#include <cstdint>
#include <map>

#include "tools/scale/scale_study.h"
#include "tools/train/run.h"

namespace tranche::tools {

/// Estimates the remaining time from the durations of earlier runs.
class TimeLeft {
 public:
  void took(const ScaleRun& run, double seconds);
  /// Infinite before any run has ended.
  double of(const ScaleRun& run) const;

 private:
  struct Sum {
    double seconds = 0, count = 0;
  };
  std::map<int, Sum> by_ranks_;
  Sum per_rank_;
};

/// Exit status of a study with failed or missing runs; it extends core/error.h.
inline constexpr int study_incomplete = 7;

/// Returns the exit status: 0 when every run succeeded, stopped_by_signal (launch.h) for a stopped study,
/// else study_incomplete. Throws ConfigurationError for errors that are found before any run.
int run_scale(const Options& options, const Output& output);

}  // namespace tranche::tools
