#pragma once
/// The groups of ranks that a rank sends data of a step to. Private to engine/.

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

/// The communicators of a rank, each once: all ranks, those of its mesh's axes and what these share tensors
/// in.
class DataGroups {
 public:
  /// All arguments outlive it.
  DataGroups(const Runtime& runtime, const Config& config, const ModelSpec& model);

  /// The communicators of a flat buffer of the mesh, as this rank has them. All ranks ask for the same
  /// buffers in the same order, as some are made by that. Throws ConfigurationError for what cannot be shared
  /// yet.
  BufferRanks of(const Placement& placement, int buffer);

  /// The ranks among which matrices of a buffer have owners that compute them whole.
  struct MatrixRanks {
    Communicator* group = nullptr;  ///< null: this rank does not hold the buffer
    std::vector<int> in_mesh;       ///< their numbers in the mesh, by their rank in the group
  };
  /// The ranks that have a part of the buffer: those of a stage's axes that share out state, with `tensor`
  /// where it cuts the buffer, and with Replicate::parameters those of its replicas too. All ranks ask for
  /// the same buffers in the same order. Throws ConfigurationError for a buffer that two stages of a pipeline
  /// share and the axis `tensor` cuts.
  MatrixRanks of_matrices(const Placement& placement, int buffer);

  const std::vector<Communicator*>& all() const { return groups_; }
  /// The axis that data goes along in a group, by its place in all().
  MeshAxis axis(std::size_t group) const { return axes_[group]; }
  MeshAxis axis_of(const Communicator& group) const;

  /// Bytes of a step's data that went to other nodes: from this rank, and from all ranks of its node, which
  /// are taken to send alike.
  struct Crossing {
    std::int64_t rank = 0, node = 0;
  };
  /// Nothing where the communicators do not count them.
  std::optional<Crossing> to_other_nodes(const StepTraffic& traffic) const;

 private:
  void add(Communicator* group, MeshAxis axis);

  const Runtime& runtime_;
  const Config& config_;
  const ModelSpec& model_;
  std::vector<Communicator*> groups_;
  std::vector<MeshAxis> axes_;
  /// The ranks that share key and value heads, of which there are fewer than ranks; null: there are none.
  std::unique_ptr<Communicator> sharers_;
  int sharers_size_ = 0;  ///< of the axis `tensor`
  /// All ranks of this one's stage of a pipeline, where matrices need them; else null.
  std::unique_ptr<Communicator> stage_;
};

}  // namespace tranche::detail
