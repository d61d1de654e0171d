#pragma once
/// The traffic of a step between ranks, by the communicator's meter. Private to engine/.

#include <map>
#include <string>

#include "tranche/comm/meter.h"

namespace tranche::detail {

class StepTraffic {
 public:
  using Counts = std::map<std::string, TrafficCount>;

  void begin(const ByteMeter& meter);
  void end(const ByteMeter& meter);
  /// Traffic of the last whole step, by operation; those that were called.
  const Counts& data() const { return data_; }
  const Counts& control() const { return control_; }

 private:
  Counts data_before_, control_before_, data_, control_;
};

}  // namespace tranche::detail
