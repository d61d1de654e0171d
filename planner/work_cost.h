#pragma once
/// The seconds that a machine takes for recorded work. Private to planner/.

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "device/work_recorder.h"
#include "planner/simulation.h"
#include "tranche/config/config.h"
#include "tranche/partition/mesh.h"
#include "tranche/planner/machine.h"
#include "tranche/planner/projection.h"

namespace tranche::planner {

/// The resources of a rank in a simulation: cores and disk.
enum RankResource { cores, disk_resource, rank_resources };

/// Refers to the request and the configuration, which must outlive it.
class WorkCost {
 public:
  /// Throws ConfigurationError if ranks are on several nodes and no network is given.
  WorkCost(const ProjectionRequest& request, const Config& config);

  /// Bytes that the rank's node sends to others for a collective or a message.
  double node_bytes(const detail::RecordedWork& work, int rank) const;
  /// The capacity of the resource `cores`.
  double core_capacity() const { return on_cpu_ ? cores_ : 1; }
  /// Seconds of a kernel launch.
  double launch() const { return share_.launch_seconds; }
  /// Figures that were not measured, and their sources.
  const std::set<std::string>& notes() const { return notes_; }
  /// Seconds of a rank's work without its launch; adds the resources that it claims to `claims`. Throws
  /// ConfigurationError if the machine lacks figures for it.
  double seconds(const detail::RecordedWork& work, int rank, const std::string& lane,
                 std::vector<Claim>& claims);

 private:
  struct Placed {
    std::string operation;
    int inside;  ///< ranks of the group on one node
    int groups;  ///< groups on the node that do the same at the same time
  };
  double kernel_seconds(const detail::RecordedWork& work);
  double copy_seconds(const detail::RecordedWork& work, const std::string& lane, std::vector<Claim>& claims);
  double disk_seconds(const detail::RecordedWork& work, std::vector<Claim>& claims) const;
  const ProductTable& product_table(const detail::GemmShape& product) const;
  Placed placed(const detail::RecordedWork& work, int rank) const;
  int groups_on_node(const detail::RecordedWork& work, int rank) const;
  int count_groups(const std::vector<int>& members, int node) const;
  Placed placed_message(const detail::RecordedWork& work, int rank) const;
  double collective_seconds_of(const detail::RecordedWork& work, const Placed& place, double full_bytes,
                               std::vector<Claim>& claims);

  const Machine& machine_;
  const Config& config_;
  int ranks_;
  Mesh mesh_;
  int ranks_per_node_;
  LinkRate network_;
  int sharing_;
  const ComputeShare& share_;
  bool on_cpu_ = true;
  double cores_ = 1, threads_ = 1, slower_ = 1;
  std::set<std::string> notes_;
  /// The counts of groups_on_node(), by the members of a group and the node.
  mutable std::map<std::pair<std::shared_ptr<const std::vector<int>>, int>, int> groups_;
};

}  // namespace tranche::planner
