#pragma once
/// The digest of a model's state, whatever ranks hold it, and whether copies of it agree. Private to engine/.

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
  /// All arguments outlive it; nothing else uses the workspace while it lives. `with_state`: of the
  /// optimizer's state too; `frozen`: of frozen weights alone.
  StateDigest(StateStore& store, const Config& config, const Mesh& mesh, Device& device,
              MemoryResource& memory, kernels::Workspace workspace, bool with_state, bool frozen);

  /// Over all ranks; optimizer state comes under indices behind the weights'. Throws CommunicationError on
  /// all ranks when copies differ, naming the first rank that holds another. Collective.
  kernels::Digest over(Communicator& ranks, const OperationLabel& label);

 private:
  /// Sums of what this rank owns, of weights and of state that all ranks keep alike, and of those parts of a
  /// shard that its replicas keep alike; and of what both ends of a pipeline, all ranks of the axis `tensor`,
  /// or the neighbours on it that share a slice, keep alike.
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
  /// A part of one tensor whose master weights are in halves.
  void add_joined(const ShardSlice& part, std::uint64_t index, std::int64_t first, kernels::Digest* target);
  /// Adds the elements that this rank owns of a frozen buffer that lives off the device.
  void add_frozen_off_device(FlatBuffer& flat);
  /// Adds the elements that other ranks hold copies of.
  void add_copies(FlatBuffer& flat);
  void compare_copies(const std::vector<Sums>& all) const;
  /// The number of neighbours on the axis `tensor` that share slices; 1 where each slice has one rank. All
  /// such slices of a model have the same number (DataGroups).
  int sharers_of_slices() const;

  StateStore& store_;
  const Config& config_;
  const Mesh& mesh_;
  Device& device_;
  Stream& compute_;
  bool with_state_, frozen_;
  Buffer instead_;              ///< of a workspace that is too small
  kernels::Workspace scratch_;  ///< sums, then room for numbers whose halves are put together
  Sums host_sums_;              ///< of what lives in host memory
};

}  // namespace tranche::detail
