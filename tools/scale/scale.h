#pragma once
/// `tranche scale`: runs of this program under mpirun, over ranks and stages, to a table and plots.

#include <cstdint>
#include <map>

#include "tools/scale/scale_study.h"
#include "tools/train/run.h"

namespace tranche::tools {

/// How long what is left will take, from what runs took so far.
class TimeLeft {
 public:
  void took(const ScaleRun& run, double seconds);
  /// Not finite before there is anything to go by.
  double of(const ScaleRun& run) const;

 private:
  struct Sum {
    double seconds = 0, count = 0;
  };
  std::map<int, Sum> by_ranks_;
  Sum per_rank_;
};

/// Exit status of a study of which runs failed or were not reached; beside those of core/error.h.
inline constexpr int study_incomplete = 7;

/// Returns the exit status: 0 when every run is there, stopped_by_signal (launch.h) of a study that was
/// stopped, else study_incomplete. Throws ConfigurationError for
/// what is told before any run.
int run_scale(const Options& options, const Output& output);

}  // namespace tranche::tools
