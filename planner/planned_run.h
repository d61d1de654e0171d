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
/// Rounds of different lengths after which memory is as in all that follow: the first pass is not recorded,
/// and a length that the second round finds beyond what was recorded is recorded there.
inline constexpr int settling_rounds = 2;

/// The request's configuration with every size filled in. Throws ConfigurationError for what a run would
/// refuse.
Config checked_config(const PlanRequest& request);
/// The configuration asks for chains of sums, on a mesh that has some.
bool in_chains(const Config& config, int ranks);

/// The model as the engine has it, with adapters.
ModelSpec planned_spec(const PlanRequest& request);

/// Positions in `ranks`, which differ in the axis `tensor` alone, in classes of ranks whose plans are equal:
/// they hold parts of equal sizes. With a Config::layout each rank is in a class of its own, because the
/// sizes of whole tensors do not tell how much of them a rank computes. Throws as checked_config() and
/// tensor_cuts().
std::vector<std::vector<int>> equal_ranks(const PlanRequest& request, const std::vector<int>& ranks);

/// Without limits, as the whole need is wanted and not where it ends.
RuntimeOptions meta_options(const Config& config, DeviceKind device);

/// The model under the engine, whichever kind it is, on tokens that are nowhere. Its tensors are those that a
/// run has for its micro-batches.
class PlannedRun {
 public:
  PlannedRun(Runtime& runtime, const PlanRequest& request, const Config& config);

  Engine& engine() noexcept { return engine_; }
  /// Steps, and micro-batches of an evaluation, after which all that follow take memory as before.
  int steps() const;
  int evaluations() const;
  /// Runs the micro-batches of one step.
  void micro_batches();
  void evaluate();

 private:
  /// The next micro-batch, of the next length.
  models::TokenBatch batch();

  Engine engine_;
  std::shared_ptr<const models::LanguageModel> language_;  ///< empty: a list of units
  std::vector<std::int64_t> samples_;
  std::vector<std::int64_t> lengths_;
  std::size_t micro_batches_ = 0;
  bool documents_ = false;
  std::vector<Buffer> tokens_;  ///< as a BatchFeeder has them
  Buffer staging_;              ///< used if the host cannot reach the device's memory
};

/// The meta device's runtime for one rank of `request`.
Runtime planned_runtime(const PlanRequest& request, const RuntimeOptions& options);

}  // namespace tranche::planner
