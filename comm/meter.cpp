#include "tranche/comm/meter.h"

namespace tranche {

namespace {

void add_to(TrafficCount& sum, const TrafficCount& count) {
  sum.calls += count.calls;
  sum.elements += count.elements;
  sum.bytes += count.bytes;
  sum.to_other_nodes += count.to_other_nodes;
  sum.node_to_other_nodes += count.node_to_other_nodes;
}

}  // namespace

void ByteMeter::add(std::string_view operation, Traffic traffic, const TrafficCount& call) {
  const std::lock_guard lock(mutex_);
  auto& counts = counts_[static_cast<std::size_t>(traffic)];
  auto found = counts.find(operation);
  if (found == counts.end()) found = counts.emplace(std::string(operation), TrafficCount{}).first;
  add_to(found->second, call);
}

std::map<std::string, TrafficCount> ByteMeter::counts(Traffic traffic) const {
  const std::lock_guard lock(mutex_);
  const auto& counts = counts_[static_cast<std::size_t>(traffic)];
  return {counts.begin(), counts.end()};
}

TrafficCount ByteMeter::total(Traffic traffic) const {
  const std::lock_guard lock(mutex_);
  TrafficCount sum;
  for (const auto& [name, count] : counts_[static_cast<std::size_t>(traffic)]) {
    add_to(sum, count);
  }
  return sum;
}

void ByteMeter::reset() {
  const std::lock_guard lock(mutex_);
  for (auto& counts : counts_) counts.clear();
}

}  // namespace tranche
