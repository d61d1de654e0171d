#pragma once
/// Builds the tasks of one simulation from the recorded work of one rank, or of one rank of each pipeline
/// stage. Private to planner/.

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
  std::vector<SimulatedTask> tasks;               ///< the tasks of each rank in the order of issue, one rank
                                                  ///< after the other
  std::vector<const detail::RecordedWork*> work;  ///< by task; null for a launch or the start of a collective
  std::vector<int> place;                         ///< by task: index of its rank in the list of ranks
  std::vector<double> launch;                     ///< by task: seconds of it that a kernel's launch takes
  std::vector<double> node_bytes;                 ///< by task: bytes that the node sends to others
  std::vector<bool> ordered;                      ///< by lane
  std::vector<std::string> lanes;                 ///< by lane: its name
  std::vector<int> ranks;                         ///< by place: the rank's number in the run
  std::vector<int> compute_lane;                  ///< by place
  std::vector<double> capacities;                 ///< by resource, rank after rank
};

/// Builds the graph of the work after each rank's first mark. A message arrives when its receive is posted,
/// its send is issued and its time has passed; then the sender may reuse its memory. Ranks of one group begin
/// its collectives together. The graph refers to the recorders' work. Throws LogicError if the ranks'
/// messages or collectives do not match.
StepGraph graph_of(const std::vector<RecordedRank>& ranks, WorkCost& costs);

}  // namespace tranche::planner
