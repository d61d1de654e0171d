#pragma once
/// The cost of offloading in the steps of a run, for people.

#include <cstdint>
#include <string>

#include "tranche/engine/step_result.h"

namespace tranche::tools {

/// Adds steps up. The first two, which plan memory and overlap with nothing, are left out once there are
/// others.
class OffloadSummary {
 public:
  void add(const StepResult& result);
  /// "offload: 12.1 ms of a step of 340 ms exposed (3.6%); no step can be shorter than 328 ms: compute 328,
  /// ..." With state on the nvme tier: "; disk idle 41.0% of the time: ..." with the reasons.
  std::string line() const;
  /// The same of one step.
  static std::string line_of(const StepResult& result);

 private:
  struct Sums {
    double steps = 0, seconds = 0, exposed = 0, compute = 0, to_host = 0, from_host = 0, host_update = 0,
           disk = 0;
    DiskIdleSeconds disk_idle;
    void add(const StepResult& result);
    std::string text() const;
  };
  Sums first_, others_;
};

}  // namespace tranche::tools
