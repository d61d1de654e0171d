#pragma once
/// The frozen base of an engine with adapters: the source of its values, and the check that they are the
/// right ones. Private to engine/.

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
  /// All arguments must outlive it. Its values must have been drawn from the configuration's seed. Nothing
  /// else may use `workspace` during a call.
  FrozenBase(const Runtime& runtime, const Config& config, const ModelSpec& model, StateStore& store,
             const Buffer& workspace)
      : runtime_(runtime),
        config_(config),
        model_(model),
        store_(store),
        workspace_(workspace),
        seed_(config.seed) {}

  /// Must be called after weights were loaded or written; the digest is then unknown.
  void changed() { digest_.reset(); }
  /// Records that the values were read from a checkpoint.
  void read_from(const std::string& folder);
  /// Draws the base that adapters were trained with, unless the engine already has the values of this seed.
  /// Collective.
  void draw(std::uint64_t seed);
  /// The digest as 32 hexadecimal digits; empty on the meta device. Collective.
  std::string digest();
  /// The record of the base for a checkpoint of adapters, with the digest if that is known.
  checkpoint::BaseRecord record() const;
  /// Collective. Throws CheckpointError unless the values are those with which the adapters of checkpoint
  /// `chosen` were trained. `base`: the checkpoint from which the values were read; null: they were drawn.
  void require(const checkpoint::Manifest& adapters, const std::string& chosen, checkpoint::Reader* base,
               std::vector<std::string>& notes);

 private:
  bool simulated() const { return runtime_.device().kind() == DeviceKind::meta; }
  kernels::Workspace workspace() const { return {workspace_.data(), workspace_.bytes()}; }
  /// The digest of the values rounded to another dtype than the engine's. Collective.
  std::string digest_in(DataType dtype, checkpoint::Reader* base) const;

  const Runtime& runtime_;
  const Config& config_;
  const ModelSpec& model_;
  StateStore& store_;
  const Buffer& workspace_;
  std::string folder_;  ///< the checkpoint that the values were read from; empty: they were drawn
  std::uint64_t seed_;  ///< the seed that they were drawn from
  std::optional<kernels::Digest> digest_;  ///< empty while unknown
};

}  // namespace tranche::detail
