#pragma once
/// A discrete-event simulation of tasks on lanes that share resources. A lane is a stream, a host thread, a
/// link or a communicator.

#include <string>
#include <vector>

namespace tranche::planner {

struct Claim {
  int resource = 0;
  double amount = 0;  ///< units of the resource's capacity that the task occupies while it runs at full speed
};

struct SimulatedTask {
  int lane = 0;
  double seconds = 0;  ///< duration if no other task shares its resources
  std::vector<Claim> claims;
  std::vector<int> after;  ///< indices of the tasks that must end first
};

struct SimulatedSpan {
  double begin = 0, end = 0;
  int cause = -1;  ///< the task whose end allowed this one to begin; -1: none
};

/// Simulates the tasks. A lane runs one task at a time, in the order of the tasks if it is `ordered`, else in
/// the order in which they become ready. If running tasks together claim more of a resource than its
/// capacity, each is slowed by claims over capacity, taken for the resource that slows it most. Returns a
/// span for each task. Deterministic. Throws InvalidArgument for a graph that cannot be run.
std::vector<SimulatedSpan> simulate(const std::vector<SimulatedTask>& tasks,
                                    const std::vector<bool>& lane_ordered,
                                    const std::vector<double>& capacities);

}  // namespace tranche::planner
