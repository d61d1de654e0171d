#pragma once
/// One figure of many noisy times, for calibrations. No measuring here: plain numbers in, plain numbers out.

#include <cstddef>
#include <vector>

#include "tranche/planner/machine.h"

namespace tranche::tools {

/// The middle of `values`, the upper one of an even number; at least one value.
double median(std::vector<double> values);

/// Takes the median of each rate over the passes, which all have the same tables; at least one pass.
std::vector<planner::ProductTable> median_tables(
    const std::vector<std::vector<planner::ProductTable>>& passes);

/// The same of the seconds at each point of kernels' tables.
std::vector<planner::KernelTable> median_tables(const std::vector<std::vector<planner::KernelTable>>& passes);

/// Adds `tables` to those of `share`, in place of those of the same kernel and dtype.
void replace_tables(planner::ComputeShare& share, std::vector<planner::KernelTable> tables);

/// Steps of several ranks that begin each step together.
struct SharedSteps {
  std::vector<double> passed;  ///< seconds of each step until the last rank had ended it
  std::vector<double> own;     ///< seconds of each step of this rank by the clock of its kernels
};

/// The step time of ranks that wait for each other over the time of a rank's kernels: the ratio of the
/// medians, each of the visits' own, and of these the median. Visits of fewer than `least_steps` steps, or of
/// steps shorter than `least_seconds`, say more of the meeting than of the steps and do not count. At least
/// 1; 1 when no visit counts.
double waiting_factor(const std::vector<SharedSteps>& visits);

inline constexpr std::size_t least_steps = 3;
inline constexpr double least_seconds = 8e-3;

/// Multiplies the time of all that the share's ranks compute.
void slow_down(planner::ComputeShare& share, double factor);

}  // namespace tranche::tools
