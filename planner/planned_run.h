#pragma once
/// A planned run: the real engine with its model on the meta device, as one rank of any number of ranks.
///
/// The meta device allocates no memory and computes nothing, but its ledger and its meter count every buffer
/// and every transfer. So the engine executes the same calls as a real run, and the plan has the same bytes:
///
///   step 1 records the order of units --> step 2 packs the step's memory --> step 3 is like all later steps
///
/// plan_run() (planner.cpp) reads ledger and meter after step 3; record_steps() adds a WorkRecorder and keeps
/// the calls themselves, for the projection (projection.cpp). Batches of several lengths take more steps to
/// settle.

#include <cstdint>
#include <memory>
#include <vector>

#include "tranche/device/memory.h"
#include "tranche/engine/engine.h"
#include "tranche/engine/runtime.h"
#include "tranche/models/language_model.h"
#include "tranche/planner/planner.h"

namespace tranche::planner {

/// Steps after which memory and order no longer change: the first records the order of units, the second
/// packs its memory.
inline constexpr int settling_steps = 2;
/// Rounds of the lengths after which memory no longer changes. The first pass is not recorded; the second
/// round records the lengths that need more than the recorded memory.
inline constexpr int settling_rounds = 2;

/// The request's configuration with every size filled in. Throws ConfigurationError for what a run would
/// refuse.
Config checked_config(const PlanRequest& request);
/// True if the configuration asks for chains of sums and the mesh has the axis `tensor`.
bool in_chains(const Config& config, int ranks);

/// The model with its adapters, as the engine has it.
ModelSpec planned_spec(const PlanRequest& request);

/// Positions in `ranks`, grouped into classes of ranks with equal plans; the ranks differ in the axis
/// `tensor` alone. Ranks of a class hold parts of equal sizes. With a Config::layout each rank is in a class
/// of its own, because the sizes of whole tensors do not show how much of them a rank computes. Throws as
/// checked_config() and tensor_cuts() do.
std::vector<std::vector<int>> equal_ranks(const PlanRequest& request, const std::vector<int>& ranks);

/// Options of a planned run: no limits, because a plan measures the whole need.
RuntimeOptions meta_options(const Config& config, DeviceKind device);

/// The engine with its model (a language model or a list of units). Token buffers have the sizes of a run's,
/// but their batches have no data.
class PlannedRun {
 public:
  PlannedRun(Runtime& runtime, const PlanRequest& request, const Config& config);

  Engine& engine() noexcept { return engine_; }
  /// The number of steps, and of an evaluation's micro-batches, after which memory no longer changes.
  int steps() const;
  int evaluations() const;
  /// Runs the micro-batches of one step.
  void micro_batches();
  void evaluate();

 private:
  /// The next micro-batch; lengths rotate.
  models::TokenBatch batch();

  Engine engine_;
  std::shared_ptr<const models::LanguageModel> language_;  ///< null for a list of units
  std::vector<std::int64_t> samples_;
  std::vector<std::int64_t> lengths_;
  std::size_t micro_batches_ = 0;
  bool documents_ = false;
  std::vector<Buffer> tokens_;  ///< the same buffers as those of a BatchFeeder
  Buffer staging_;              ///< used if the host cannot reach the device's memory
};

/// The meta device's runtime for one rank of `request`.
Runtime planned_runtime(const PlanRequest& request, const RuntimeOptions& options);

}  // namespace tranche::planner
