#pragma once
/// Computes the bytes of an engine's state and its transfers from layouts and configuration alone. Private to
/// engine/.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "engine/flat_updater.h"
#include "engine/stages.h"
#include "engine/state_store.h"
#include "tranche/engine/state_bytes.h"
#include "tranche/engine/step_result.h"

namespace tranche::detail {

class StateFormulas {
 public:
  using Bytes = StateBytes;

  /// The arguments must outlive it; they are read at each call. `stages`: the pipeline's; null without one.
  /// `stage`: this rank's.
  StateFormulas(const Config& config, const ModelSpec& model, const StateStore& store,
                const FlatUpdater& updater, const Stages* stages = nullptr, int stage = 0)
      : config_(config), model_(model), store_(store), updater_(updater), stages_(stages), stage_(stage) {}

  Bytes bytes() const;
  /// Describes the bytes of each tier, such as "1.2 GiB on the device + 3.4 GiB in host memory"; empty tiers
  /// are left out.
  static std::string by_tier(const Bytes& bytes);
  /// Model state of this rank at another ZeRO stage, plus the slots that a step holds at once. It is an
  /// estimate that shows when a stage does not save memory.
  std::int64_t resident_bytes(int of_stage) const;
  /// A sentence for errors with the bytes of each ZeRO stage, or, with offload, those of this stage on each
  /// tier.
  std::string stages_for_comparison() const;
  /// Bytes of a step by the formula, without the disk's padding. The number of gathers is the model's
  /// declaration, or else two in a micro-batch.
  OffloadTraffic offload() const;
  /// Rows of the start-up table about offload: the state that is offloaded, the disk (`swap_file` describes
  /// it; empty: none), and the bytes of a step.
  std::vector<std::pair<std::string, std::string>> offload_rows(const std::string& swap_file) const;
  /// Padded elements that a step gathers in stage 3, by the model's declaration; -1: unknown.
  std::int64_t declared_gathers() const { return declared_gathers(config_.gather_for); }
  /// The same for this value of Config::gather_for.
  std::int64_t declared_gathers(GatherFor gather_for) const;
  /// True if the pipeline's schedule gathers each chunk once for several micro-batches.
  bool gathers_chunks() const;
  /// The number of unit gathers in a step of such a schedule; -1 when the model does not declare them.
  std::int64_t declared_unit_gathers() const;
  /// Padded elements of all units that stage 3 gathers.
  std::int64_t gathered_elements() const;
  /// Padded elements of the buffers whose new parameters a step gathers after the update. Only buffers count
  /// whose group extends over `axis` (FlatBuffer::axis()) and, unless `group` is 0, has so many ranks.
  std::int64_t published_elements(MeshAxis axis = MeshAxis::shard, int group = 0) const;

 private:
  /// How often a step gathers each unit; if the model does not declare it, twice a micro-batch.
  std::vector<std::int64_t> gathers_of_step(GatherFor gather_for) const;

  const Config& config_;
  const ModelSpec& model_;
  const StateStore& store_;
  const FlatUpdater& updater_;
  const Stages* stages_;
  int stage_;
};

}  // namespace tranche::detail
