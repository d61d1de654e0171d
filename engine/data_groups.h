#pragma once
/// The groups of ranks that a rank sends data of a step to. Private to engine/.

#include <optional>
#include <vector>

#include "engine/step_traffic.h"
#include "tranche/comm/communicator.h"
#include "tranche/engine/runtime.h"
#include "tranche/partition/mesh.h"

namespace tranche::detail {

/// The communicators of a rank, each once: all ranks, those of its mesh's axes, and the ends of a pipeline.
class DataGroups {
 public:
  /// It outlives this.
  explicit DataGroups(const Runtime& runtime);

  const std::vector<Communicator*>& all() const { return groups_; }
  /// The axis that data goes along in a group, by its place in all().
  MeshAxis axis(std::size_t group) const { return axes_[group]; }

  /// Bytes of a step's data that went to other nodes: from this rank, and from all ranks of its node, which
  /// are taken to send alike.
  struct Crossing {
    std::int64_t rank = 0, node = 0;
  };
  /// Nothing where the communicators do not count them.
  std::optional<Crossing> to_other_nodes(const StepTraffic& traffic) const;

 private:
  std::vector<Communicator*> groups_;
  std::vector<MeshAxis> axes_;
};

}  // namespace tranche::detail
