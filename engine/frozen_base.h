#pragma once
/// The frozen base of adapters in an engine: where its values came from, and whether they are the right ones.
/// Private to engine/.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/format.h"
#include "checkpoint/reader.h"
#include "engine/state_store.h"
#include "tranche/device/memory.h"
#include "tranche/engine/runtime.h"
#include "tranche/kernels/reduction.h"

namespace tranche::detail {

class FrozenBase {
 public:
  /// All arguments outlive it. Its values were drawn from the configuration's seed. Nothing else uses
  /// `workspace` during a call.
  FrozenBase(const Runtime& runtime, const Config& config, const ModelSpec& model, StateStore& store,
             const Buffer& workspace)
      : runtime_(runtime),
        config_(config),
        model_(model),
        store_(store),
        workspace_(workspace),
        seed_(config.seed) {}

  /// Weights were loaded or written: the digest is not known any more.
  void changed() { digest_.reset(); }
  /// The values were read from a checkpoint.
  void read_from(const std::string& folder);
  /// Draws the values that adapters without a base of their own were trained beside, unless they are there.
  /// Collective.
  void draw(std::uint64_t seed);
  /// 32 hexadecimal digits; empty on the meta device. Collective.
  std::string digest();
  /// The record of the base that a checkpoint of adapters stores, with the digest if that is known.
  checkpoint::BaseRecord record() const;
  /// Collective. Throws CheckpointError unless the values are those that the adapters of checkpoint `chosen`
  /// were trained beside. `base`: the checkpoint that they were read from; null: they were drawn.
  void require(const checkpoint::Manifest& adapters, const std::string& chosen, checkpoint::Reader* base,
               std::vector<std::string>& notes);

 private:
  bool simulated() const { return runtime_.device().kind() == DeviceKind::meta; }
  kernels::Workspace workspace() const { return {workspace_.data(), workspace_.bytes()}; }
  /// The digest of the values rounded to another dtype than they are held in. Collective.
  std::string digest_in(DataType dtype, checkpoint::Reader* base) const;

  const Runtime& runtime_;
  const Config& config_;
  const ModelSpec& model_;
  StateStore& store_;
  const Buffer& workspace_;
  std::string folder_;                     ///< the checkpoint that the values came from; empty: drawn
  std::uint64_t seed_;                     ///< that they were drawn from
  std::optional<kernels::Digest> digest_;  ///< while it is known
};

}  // namespace tranche::detail
