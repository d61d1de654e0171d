#pragma once
/// `tranche calibrate`: measures the speed of this machine's computation and transfers, as a Machine.

#include <memory>

#include "tools/arguments.h"
#include "tools/train/run.h"
#include "tranche/comm/communicator.h"
#include "tranche/device/device.h"
#include "tranche/planner/machine.h"

namespace tranche::tools {

/// Collective under mpirun. Measures and writes --out from rank 0; returns the exit status.
int run_calibrate(const Options& options, const Output& output);

/// Collective over `group`, the ranks of a node that share it. Measures GEMMs, memory and the kernels of
/// probing steps, with `threads` of each rank, within about `seconds`.
planner::ComputeShare measure_share(Communicator& group, int threads, double seconds);

/// The kernels of a few steps of small GPTs, timed within the steps.
class StepProbes {
 public:
  /// All passes together take about `seconds`. `group` outlives it.
  StepProbes(Communicator& group, int threads, double seconds);
  ~StepProbes();
  /// Collective over the group, whose ranks begin each step together. Runs every probe for its part of the
  /// time; the largest runs in one pass only, because its steps are so long that each is a measurement of its
  /// own.
  void run_pass(int pass, int passes);
  /// Adds tables of kernels and launch time to `share`, and adjusts its GEMM rates to those inside steps.
  /// Each kernel call's time is the median of the passes; with several ranks all times are increased by the
  /// measured cost of meeting after every step (waiting_factor).
  void add_to(planner::ComputeShare& share) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Collective over `group` (at least two ranks). Adds tables of every operation on buffers of `memory`, the
/// memory that a run uses: ranks that share a node may read them in place.
void measure_collectives(Communicator& group, MemoryResource& memory, double seconds,
                         std::vector<planner::CollectiveTable>& tables);

}  // namespace tranche::tools
