#pragma once
/// `tranche calibrate`: what this machine computes and moves in a second, as a Machine.

#include <memory>

#include "tools/arguments.h"
#include "tools/train/run.h"
#include "tranche/comm/communicator.h"
#include "tranche/device/device.h"
#include "tranche/planner/machine.h"

namespace tranche::tools {

/// Collective under mpirun. Measures and writes --out from rank 0; returns the exit status.
int run_calibrate(const Options& options, const Output& output);

/// Collective over `group`, the ranks of a node that are to share it. Products, memory and the kernels of
/// probing steps, with `threads` of each rank, within about so many seconds.
planner::ComputeShare measure_share(Communicator& group, int threads, double seconds);

/// The kernels of a few steps of small GPTs, timed as they run in them.
class StepProbes {
 public:
  /// All passes together within about `seconds`. `group` outlives it.
  StepProbes(Communicator& group, int threads, double seconds);
  ~StepProbes();
  /// Collective over the group, whose ranks begin each step together. Runs every probe for its part of the
  /// time; the largest in one pass only, since its steps are so long
  /// that each is a measurement of its own.
  void run_pass(int pass, int passes);
  /// Adds tables of kernels and launch time to `share`, and brings its rates of products to what they are
  /// inside steps. Of each kernel call the median of the passes; with several ranks all of it takes longer by
  /// what meeting behind every step was seen to cost (waiting_factor).
  void add_to(planner::ComputeShare& share) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Collective over `group` (two ranks at least). Adds tables of every operation on buffers of `memory`, which
/// is where a run's are: ranks that share a node may read them in place.
void measure_collectives(Communicator& group, MemoryResource& memory, double seconds,
                         std::vector<planner::CollectiveTable>& tables);

}  // namespace tranche::tools
