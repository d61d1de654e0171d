#pragma once
/// The groups of ranks with which a rank exchanges a step's data. Private to engine/.

#include <memory>
#include <optional>
#include <vector>

#include "engine/state_layout.h"
#include "engine/step_traffic.h"
#include "partition/placement.h"
#include "tranche/comm/communicator.h"
#include "tranche/config/config.h"
#include "tranche/engine/model_spec.h"
#include "tranche/engine/runtime.h"
#include "tranche/partition/mesh.h"

namespace tranche::detail {

/// A rank's communicators, each once: all ranks, those of the mesh's axes, and those that share tensors (see
/// the note in partition/placement.h).
class DataGroups {
 public:
  /// All arguments must outlive it.
  DataGroups(const Runtime& runtime, const Config& config, const ModelSpec& model);

  /// This rank's communicators for a flat buffer. All ranks must call it for the same buffers in the same
  /// order, because some calls create a communicator. Throws ConfigurationError for unsupported combinations
  /// of shared tensors.
  BufferRanks of(const Placement& placement, int buffer);

  /// The ranks that divide a buffer's matrices among themselves, each computing whole ones.
  struct MatrixRanks {
    Communicator* group = nullptr;    ///< null: this rank does not hold the buffer
    std::vector<int> in_mesh;         ///< the ranks' numbers in the mesh, by rank in the group
    MeshAxis axis = MeshAxis::shard;  ///< the axis along which their messages are sent
  };
  /// The ranks that have a part of the buffer: those of one stage over which state is sharded, including
  /// `tensor` if it cuts the buffer, and with Replicate::parameters also those of the replicas. All ranks
  /// must call it for the same buffers in the same order. Throws ConfigurationError for a buffer that two
  /// pipeline stages share and the axis `tensor` cuts.
  MatrixRanks of_matrices(const Placement& placement, int buffer);

  const std::vector<Communicator*>& all() const { return groups_; }
  /// The axis along which a group sends data, by its index in all().
  MeshAxis axis(std::size_t group) const { return axes_[group]; }
  /// Bytes of a step's data that were sent to other nodes: from this rank, and from all ranks of its node,
  /// which are assumed to send equal amounts.
  struct Crossing {
    std::int64_t rank = 0, node = 0;
  };
  /// nullopt if the communicators do not count them.
  std::optional<Crossing> to_other_nodes(const StepTraffic& traffic) const;

 private:
  MeshAxis axis_of(const Communicator& group) const;
  void add(Communicator* group, MeshAxis axis);

  const Runtime& runtime_;
  const Config& config_;
  const ModelSpec& model_;
  std::vector<Communicator*> groups_;
  std::vector<MeshAxis> axes_;
  /// The ranks that share key/value heads, if there are fewer heads than ranks; null otherwise.
  std::unique_ptr<Communicator> sharers_;
  int sharers_size_ = 0;  ///< of the axis `tensor`
  /// All ranks of this pipeline stage, if matrices need them; null otherwise.
  std::unique_ptr<Communicator> stage_;
};

}  // namespace tranche::detail
