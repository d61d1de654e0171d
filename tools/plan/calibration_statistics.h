#pragma once
/// Reduces many noisy times to one figure, for calibrations. It measures nothing: plain numbers in, plain
/// numbers out.

#include <cstddef>
#include <vector>

#include "tranche/planner/machine.h"

namespace tranche::tools {

/// The median of `values`, the upper one for an even number; at least one value.
double median(std::vector<double> values);

/// The median of each rate over the passes, which all have the same tables; at least one pass.
std::vector<planner::ProductTable> median_tables(
    const std::vector<std::vector<planner::ProductTable>>& passes);

/// The same for the seconds at each point of kernels' tables.
std::vector<planner::KernelTable> median_tables(const std::vector<std::vector<planner::KernelTable>>& passes);

/// Adds `tables` to those of `share`, replacing those with the same kernel and dtype.
void replace_tables(planner::ComputeShare& share, std::vector<planner::KernelTable> tables);

/// Steps of several ranks that begin each step together.
struct SharedSteps {
  std::vector<double> passed;  ///< seconds of each step until the last rank ended it
  std::vector<double> own;     ///< seconds of each step on this rank by the kernels' clock
};

/// The step time of ranks that wait for each other, divided by the time of a rank's kernels: the ratio of the
/// medians for each visit, and the median of these ratios. Visits with fewer than `least_steps` steps, or
/// with steps shorter than `least_seconds`, measure the meeting rather than the steps and do not count. At
/// least 1; 1 when no visit counts.
double waiting_factor(const std::vector<SharedSteps>& visits);

inline constexpr std::size_t least_steps = 3;
inline constexpr double least_seconds = 8e-3;

/// Multiplies the times of all kernels in `share`.
void slow_down(planner::ComputeShare& share, double factor);

}  // namespace tranche::tools
