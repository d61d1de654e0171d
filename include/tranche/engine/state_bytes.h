#pragma once
/// The bytes of the model state that a rank keeps.

#include <array>
#include <cstdint>

#include "tranche/device/memory.h"

namespace tranche {

/// Persistent model-state bytes of a rank by the formula, padding included and apart.
struct StateBytes {
  std::int64_t parameters = 0, gradients = 0, optimizer = 0;  ///< as allocated
  std::int64_t padding = 0;                                   ///< of these, for padding elements
  struct OnTier {
    std::int64_t parameters = 0, gradients = 0, optimizer = 0;
  };
  std::array<OnTier, tier_count> tiers;  ///< of these, where they live
  /// Bytes of weights, and of master weights and optimizer state, that are asked for on nvme; and those of
  /// them that stay in host memory (tranche.host_state).
  std::int64_t asked_on_nvme = 0, stay_in_host = 0;
  /// Elements of flat buffers whose optimizer state this rank keeps, and those of them that left the device.
  std::int64_t kept_elements = 0, moved_elements = 0;
};

}  // namespace tranche
