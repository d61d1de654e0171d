#pragma once
/// The digest of a model's state, independent of its distribution over ranks, and the comparison of copies.
/// Private to engine/.

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/state_store.h"
#include "tranche/kernels/reduction.h"
#include "tranche/kernels/workspace.h"
#include "tranche/partition/mesh.h"

namespace tranche::detail {

class StateDigest {
 public:
  /// All arguments must outlive it; nothing else may use the workspace during its lifetime. `with_state`
  /// includes the optimizer's state; `frozen` restricts it to frozen weights.
  StateDigest(StateStore& store, const Config& config, const Mesh& mesh, Device& device,
              MemoryResource& memory, kernels::Workspace workspace, bool with_state, bool frozen);

  /// The digest over all ranks; optimizer state has higher indices than weights. Throws CommunicationError on
  /// all ranks when copies differ, naming the first rank with a different copy. Collective.
  kernels::Digest over(Communicator& ranks, const OperationLabel& label);

 private:
  /// Sums over different sets of elements: those that this rank owns; weights and state of which all ranks
  /// keep equal copies; the parts of a shard of which its replicas keep copies; and the elements of which
  /// both ends of a pipeline, all ranks of the axis `tensor`, or the neighbours on it that share a slice keep
  /// copies.
  enum Sum {
    own_elements,
    weights_of_all,
    state_of_all,
    weights_of_shard,
    state_of_shard,
    weights_of_ends,
    state_of_ends,
    weights_of_tensor,
    state_of_tensor,
    weights_of_sharers,
    state_of_sharers,
    sum_count
  };
  using Sums = std::array<kernels::Digest, sum_count>;
  static constexpr std::int64_t joined_at = round_up(static_cast<std::int64_t>(sizeof(Sums)), 16);

  kernels::Digest* sums() { return static_cast<kernels::Digest*>(scratch_.data); }
  void add(FlatBuffer& flat);
  void add_parameters(const FlatBuffer& flat, ElementRange range, Sum sum);
  void add_state(FlatBuffer& flat, ElementRange range, Sum sum);
  void add_slice(const FlatBuffer& flat, const ShardSlice& slice, Sum sum);
  /// Adds a part of one tensor whose master weights are in halves.
  void add_joined(const ShardSlice& part, std::uint64_t index, std::int64_t first, kernels::Digest* target);
  /// Adds the elements that this rank owns of a frozen buffer on another tier than the device.
  void add_frozen_off_device(FlatBuffer& flat);
  /// Adds the elements of which other ranks hold copies.
  void add_copies(FlatBuffer& flat);
  void compare_copies(const std::vector<Sums>& all) const;
  /// The number of neighbours on the axis `tensor` that share slices; 1 if each slice is on one rank. It is
  /// the same for all shared slices of a model (DataGroups).
  int sharers_of_slices() const;

  StateStore& store_;
  const Config& config_;
  const Mesh& mesh_;
  Device& device_;
  Stream& compute_;
  bool with_state_, frozen_;
  Buffer instead_;              ///< used if the workspace is too small
  kernels::Workspace scratch_;  ///< the sums, followed by memory for joining halves
  Sums host_sums_;              ///< the sums over state in host memory
};

}  // namespace tranche::detail
