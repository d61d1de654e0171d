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
  }
  std::erase_if(after, [](const auto& entry) { return entry.second.calls == 0; });
  return after;
}

}  // namespace

void StepTraffic::begin(const ByteMeter& meter) {
  data_before_ = meter.counts(Traffic::data);
  control_before_ = meter.counts(Traffic::control);
}

void StepTraffic::end(const ByteMeter& meter) {
  data_ = difference(meter.counts(Traffic::data), data_before_);
  control_ = difference(meter.counts(Traffic::control), control_before_);
}

}  // namespace tranche::detail
