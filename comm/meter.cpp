#include "tranche/comm/meter.h"

namespace tranche {

void ByteMeter::add(std::string_view operation, Traffic traffic, std::int64_t elements, std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  auto& counts = counts_[static_cast<std::size_t>(traffic)];
  auto found = counts.find(operation);
  if (found == counts.end()) found = counts.emplace(std::string(operation), TrafficCount{}).first;
  ++found->second.calls;
  found->second.elements += elements;
  found->second.bytes += bytes;
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
    sum.calls += count.calls;
    sum.elements += count.elements;
    sum.bytes += count.bytes;
  }
  return sum;
}

void ByteMeter::reset() {
  const std::lock_guard lock(mutex_);
  for (auto& counts : counts_) counts.clear();
}

}  // namespace tranche
