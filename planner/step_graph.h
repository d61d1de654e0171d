#pragma once
/// Recorded work of one rank, or of a rank of each stage of a pipeline, as the tasks of one simulation.
/// Private to planner/.

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "device/work_recorder.h"
#include "planner/simulation.h"
#include "planner/work_cost.h"

namespace tranche::planner {

/// The recorded calls of a rank on its streams and communicators.
struct RecordedRank {
  int rank = 0;
  std::shared_ptr<detail::WorkRecorder> recorder;
};

struct StepGraph {
  std::vector<SimulatedTask> tasks;               ///< rank by rank, each in the order of issue
  std::vector<const detail::RecordedWork*> work;  ///< by task; null: a launch, or a meeting
  std::vector<int> place;                         ///< by task: its rank's place in the list of ranks
  std::vector<double> launch;                     ///< by task: seconds of it that only start a kernel
  std::vector<double> node_bytes;                 ///< by task: data that the node sends to others
  std::vector<bool> ordered;                      ///< by lane
  std::vector<std::string> lanes;                 ///< by lane: its name
  std::vector<int> ranks;                         ///< by place: its number in the run
  std::vector<int> compute_lane;                  ///< by place
  std::vector<double> capacities;                 ///< of each rank's resources
};

/// The work behind the first mark of each rank. A message is there when its receive was posted, its send was
/// issued and its time has passed, and then the sender has its memory back. Ranks that are in one group begin
/// its collectives together. Refers to the recorders' work. Throws LogicError where the ranks do not match.
StepGraph graph_of(const std::vector<RecordedRank>& ranks, WorkCost& costs);

}  // namespace tranche::planner
