#pragma once
/// Messages within a pass between ranks that see the same samples.

#include <string>
#include <string_view>

#include "tranche/comm/communicator.h"
#include "tranche/models/language_model.h"

namespace tranche::models {

/// A message's names in errors and traces.
struct PassLabel {
  std::string unit, phase;
  PassLabel(const Pass& pass, std::string_view what);
  OperationLabel label(Tier tier = Tier::device) const { return {unit, phase, Traffic::data, tier}; }
};

/// Makes the compute stream wait for a message.
void wait_for(const Pass& pass, const Event& done);

}  // namespace tranche::models
