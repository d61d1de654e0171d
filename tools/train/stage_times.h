#pragma once
/// The fraction of a training's time in which the stages of a pipeline waited for each other's messages.

#include <cstdint>
#include <string>
#include <vector>

#include "tranche/comm/communicator.h"
#include "tranche/engine/step_result.h"
#include "tranche/partition/mesh.h"

namespace tranche::tools {

/// Sums over the ranks of a stage.
struct StageTime {
  double waited =
      0;  ///< seconds in which compute waited for other stages, and for ranks of the axis `tensor`
  double seconds = 0;  ///< of the same steps
  double idle_share() const { return seconds > 0 ? waited / seconds : 0; }
};

class StageTimes {
 public:
  /// Adds a step of this rank.
  void add(const StepResult& result);
  /// Collective over `ranks`, which are those of the mesh. Returns times for each stage over all steps except
  /// the first two, which plan memory; over all steps if there are no more. Empty without a pipeline.
  std::vector<StageTime> by_stage(Communicator& ranks, const Mesh& mesh) const;

 private:
  std::int64_t steps_ = 0;
  StageTime first_, later_;
};

/// For example "waiting for messages of other stages: 4.0% of a step on stage 2, the slowest, to 31.0% on
/// stage 0, the fastest". The slowest stage waits least. If the mesh has the axis `context` or `tensor`, the
/// line adds that a stage's own layers wait as well.
std::string idle_line(const std::vector<StageTime>& stages, const Mesh& mesh);

}  // namespace tranche::tools
