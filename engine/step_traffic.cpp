#include "engine/step_traffic.h"

#include <utility>

namespace tranche::detail {

namespace {

StepTraffic::Counts difference(StepTraffic::Counts after, const StepTraffic::Counts& before) {
  for (auto& [operation, count] : after) {
    const auto found = before.find(operation);
    if (found == before.end()) continue;
    count.calls -= found->second.calls;
    count.elements -= found->second.elements;
    count.bytes -= found->second.bytes;
    count.to_other_nodes -= found->second.to_other_nodes;
    count.node_to_other_nodes -= found->second.node_to_other_nodes;
  }
  std::erase_if(after, [](const auto& entry) { return entry.second.calls == 0; });
  return after;
}

StepTraffic::Counts counts_of(std::span<Communicator* const> groups, Traffic traffic) {
  StepTraffic::Counts sum;
  for (const Communicator* group : groups) {
    for (const auto& [operation, count] : group->meter().counts(traffic)) {
      TrafficCount& all = sum[operation];
      all.calls += count.calls;
      all.elements += count.elements;
      all.bytes += count.bytes;
      all.to_other_nodes += count.to_other_nodes;
      all.node_to_other_nodes += count.node_to_other_nodes;
    }
  }
  return sum;
}

std::vector<TrafficCount> totals_of(std::span<Communicator* const> groups) {
  std::vector<TrafficCount> totals;
  for (const Communicator* group : groups) totals.push_back(group->meter().total(Traffic::data));
  return totals;
}

}  // namespace

void StepTraffic::begin(std::span<Communicator* const> groups) {
  data_before_ = counts_of(groups, Traffic::data);
  control_before_ = counts_of(groups, Traffic::control);
  of_groups_before_ = totals_of(groups);
}

void StepTraffic::end(std::span<Communicator* const> groups) {
  data_ = difference(counts_of(groups, Traffic::data), data_before_);
  control_ = difference(counts_of(groups, Traffic::control), control_before_);
  of_groups_ = totals_of(groups);
  for (std::size_t i = 0; i < of_groups_.size() && i < of_groups_before_.size(); ++i) {
    of_groups_[i].calls -= of_groups_before_[i].calls;
    of_groups_[i].elements -= of_groups_before_[i].elements;
    of_groups_[i].bytes -= of_groups_before_[i].bytes;
    of_groups_[i].to_other_nodes -= of_groups_before_[i].to_other_nodes;
    of_groups_[i].node_to_other_nodes -= of_groups_before_[i].node_to_other_nodes;
  }
}

}  // namespace tranche::detail
