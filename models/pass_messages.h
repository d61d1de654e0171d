#pragma once
/// The messages that the ranks which see the same samples send each other within a pass.

#include <string>
#include <string_view>

#include "tranche/comm/communicator.h"
#include "tranche/models/language_model.h"

namespace tranche::models {

/// The names of a message in errors and traces.
struct PassLabel {
  std::string unit, phase;
  PassLabel(const Pass& pass, std::string_view what);
  OperationLabel label(Tier tier = Tier::device) const { return {unit, phase, Traffic::data, tier}; }
};

/// The compute stream waits for a message.
void wait_for(const Pass& pass, const Event& done);

}  // namespace tranche::models
