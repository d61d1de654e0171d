#pragma once
/// A discrete-event simulation of work on lanes that share resources.

#include <string>
#include <vector>

namespace tranche::planner {

struct Claim {
  int resource = 0;
  double amount = 0;  ///< of the resource's capacity units, while the task runs at full speed
};

struct SimulatedTask {
  int lane = 0;
  double seconds = 0;  ///< when nothing shares what it claims
  std::vector<Claim> claims;
  std::vector<int> after;  ///< indices of tasks
};

struct SimulatedSpan {
  double begin = 0, end = 0;
  int cause = -1;  ///< the task whose end let this one begin; -1: none
};

/// A lane runs one task at a time: in the order of the tasks (ordered), or whichever was ready first. Tasks
/// that together claim more of a resource than its capacity all slow down by the same factor: claims over
/// capacity, of the resource that is worst for the task. Returns a span for each task. Deterministic. Throws
/// InvalidArgument for a graph that cannot be run.
std::vector<SimulatedSpan> simulate(const std::vector<SimulatedTask>& tasks,
                                    const std::vector<bool>& lane_ordered,
                                    const std::vector<double>& capacities);

}  // namespace tranche::planner
