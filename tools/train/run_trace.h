#pragma once
/// One timeline of all ranks of a run.

#include <functional>
#include <string>

#include "tranche/comm/communicator.h"
#include "tranche/core/trace.h"
#include "tranche/partition/mesh.h"

namespace tranche::tools {

/// The seconds by which a rank's clock is ahead of rank 0's, measured by round-trip messages. The true
/// difference lies within `error` of `ahead`. It was measured at the time `at` of the rank's own clock.
struct ClockDifference {
  double at = 0, ahead = 0, error = 0;
};

/// Collective over `ranks`. Rank 0 exchanges messages with each of the others in turn and uses the shortest
/// round trip, half of which is the error. `clock`: this rank's, in seconds.
ClockDifference compare_clocks(Communicator& ranks, const std::function<double()>& clock);

/// Merges the traces of all ranks. Clocks are compared at construction and at the save; between the two they
/// are assumed to run evenly.
class RunTrace {
 public:
  /// Collective over `ranks`. All arguments outlive it.
  RunTrace(const TraceRecorder& trace, Communicator& ranks, const Mesh& mesh,
           std::function<double()> clock = {});

  /// Collective. Every rank sends its trace to rank 0, which writes one file as OutputFile does. The file has
  /// a process for each rank, named by its coordinates; consecutive pipeline stages follow each other.
  /// Returns a line about the file on rank 0 and an empty text elsewhere. Rank 0 throws IoError.
  std::string save(const std::string& path);

 private:
  const TraceRecorder& trace_;
  Communicator& ranks_;
  const Mesh& mesh_;
  std::function<double()> clock_;
  ClockDifference first_;
};

}  // namespace tranche::tools
