#pragma once
/// The traffic of a step between ranks, from the communicators' meters. Private to engine/.

#include <map>
#include <span>
#include <string>
#include <vector>

#include "tranche/comm/communicator.h"
#include "tranche/comm/meter.h"

namespace tranche::detail {

class StepTraffic {
 public:
  using Counts = std::map<std::string, TrafficCount>;

  /// `groups`: the communicators of a rank, each once.
  void begin(std::span<Communicator* const> groups);
  void end(std::span<Communicator* const> groups);
  /// The data of the last complete step, by operation, for operations that were called.
  const Counts& data() const { return data_; }
  const Counts& control() const { return control_; }
  /// The sum of data() by group.
  const std::vector<TrafficCount>& data_of_groups() const { return of_groups_; }

 private:
  Counts data_before_, control_before_, data_, control_;
  std::vector<TrafficCount> of_groups_before_, of_groups_;
};

}  // namespace tranche::detail
