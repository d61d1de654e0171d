#pragma once
/// A planned run: the real engine on the meta device, as one rank of any number, with its model.

#include <cstdint>
#include <memory>
#include <vector>

#include "tranche/device/memory.h"
#include "tranche/engine/engine.h"
#include "tranche/engine/runtime.h"
#include "tranche/models/language_model.h"
#include "tranche/planner/planner.h"

namespace tranche::planner {

/// Steps after which memory and order are as in all that follow: the first records the order of units, the
/// second is packed.
inline constexpr int settling_steps = 2;

/// The request's configuration with every size filled in. Throws ConfigurationError for what a run would
/// refuse.
Config checked_config(const PlanRequest& request);

/// Without limits, as the whole need is wanted and not where it ends.
RuntimeOptions meta_options(const Config& config, DeviceKind device);

/// The model under the engine, whichever kind it is, on tokens that are nowhere. Its tensors are those that a
/// run has for its micro-batches.
class PlannedRun {
 public:
  PlannedRun(Runtime& runtime, const PlanRequest& request, const Config& config);

  Engine& engine() noexcept { return engine_; }
  void micro_batch();
  void evaluate();

 private:
  Engine engine_;
  std::shared_ptr<const models::LanguageModel> language_;  ///< empty: a list of units
  std::vector<std::int64_t> samples_;
  Buffer tokens_, targets_;
  Buffer staging_;  ///< used if the host cannot reach the device's memory
  models::TokenBatch batch_;
};

/// The meta device's runtime for one rank of `request`.
Runtime planned_runtime(const PlanRequest& request, const RuntimeOptions& options);

}  // namespace tranche::planner
