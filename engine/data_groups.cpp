#include "engine/data_groups.h"

#include <algorithm>
#include <utility>

namespace tranche::detail {

DataGroups::DataGroups(const Runtime& runtime) {
  for (const auto& [group, axis] :
       {std::pair(&runtime.all(), MeshAxis::shard), std::pair(&runtime.shard(), MeshAxis::shard),
        std::pair(&runtime.of_stage(), MeshAxis::shard), std::pair(runtime.replicas(), MeshAxis::replicate),
        std::pair(runtime.pipeline(), MeshAxis::pipeline),
        std::pair(runtime.pipeline_ends(), MeshAxis::pipeline)}) {
    if (group == nullptr || std::count(groups_.begin(), groups_.end(), group) > 0) continue;
    groups_.push_back(group);
    axes_.push_back(axis);
  }
}

std::optional<DataGroups::Crossing> DataGroups::to_other_nodes(const StepTraffic& traffic) const {
  if (!std::all_of(groups_.begin(), groups_.end(), [](const auto* group) { return group->counts_nodes(); })) {
    return std::nullopt;
  }
  Crossing bytes;
  const std::vector<TrafficCount>& sent = traffic.data_of_groups();
  for (std::size_t i = 0; i < sent.size(); ++i) {
    bytes.rank += sent[i].to_other_nodes;
    // The node's other ranks are in groups of their own that do the same.
    bytes.node += sent[i].node_to_other_nodes * groups_.front()->local_size() / groups_[i]->local_size();
  }
  return bytes;
}

}  // namespace tranche::detail
