#pragma once
/// The bytes that an engine's state takes and moves, from its layouts and configuration alone. Private to
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

  /// The arguments outlive it; they are read when it is asked. `stages`: of a pipeline; null: there is none.
  /// `stage`: this rank's.
  StateFormulas(const Config& config, const ModelSpec& model, const StateStore& store,
                const FlatUpdater& updater, const Stages* stages = nullptr, int stage = 0)
      : config_(config), model_(model), store_(store), updater_(updater), stages_(stages), stage_(stage) {}

  Bytes bytes() const;
  /// "1.2 GiB on the device + 3.4 GiB in host memory", empty tiers left out.
  static std::string by_tier(const Bytes& bytes);
  /// Model state of this rank at another stage plus the slots that a step of it holds at once; an estimate
  /// for telling when a stage does not pay.
  std::int64_t resident_bytes(int of_stage) const;
  /// The bytes that the stages would take, as a sentence for errors; with offload what this one takes where.
  std::string stages_for_comparison() const;
  /// Bytes of a step by the formula, the disk's padding not included; as the model gathers when it says so,
  /// else twice a micro-batch.
  OffloadTraffic offload() const;
  /// Lines of the start-up table about offload: what moves, the disk (`swap_file` describes it; empty: none),
  /// bytes of a step.
  std::vector<std::pair<std::string, std::string>> offload_rows(const std::string& swap_file) const;
  /// Padded elements that a step gathers for use in stage 3 by what the model declares; -1: not known.
  std::int64_t declared_gathers() const { return declared_gathers(config_.gather_for); }
  /// The same where Config::gather_for had that value.
  std::int64_t declared_gathers(GatherFor gather_for) const;
  /// True where the schedule of a pipeline gathers chunks, each for several micro-batches.
  bool gathers_chunks() const;
  /// The gathers of units in a step under such a schedule; -1 when the model does not declare them.
  std::int64_t declared_unit_gathers() const;
  /// Padded elements of all units, where stage 3 gathers them.
  std::int64_t gathered_elements() const;
  /// Padded elements of the buffers whose new parameters a step gathers behind the update, of those whose
  /// group is spread over `axis` (FlatBuffer::axis()) and, where `group` is not 0, has so many ranks.
  std::int64_t published_elements(MeshAxis axis = MeshAxis::shard, int group = 0) const;

 private:
  /// How often a step gathers each unit; where the model does not say, twice a micro-batch.
  std::vector<std::int64_t> gathers_of_step(GatherFor gather_for) const;

  const Config& config_;
  const ModelSpec& model_;
  const StateStore& store_;
  const FlatUpdater& updater_;
  const Stages* stages_;
  int stage_;
};

}  // namespace tranche::detail
