#pragma once
/// The bytes of the model state that a rank keeps.

#include <array>
#include <cstdint>

#include "tranche/device/memory.h"

namespace tranche {

/// Persistent bytes of a rank's model state by the formula, including padding.
struct StateBytes {
  std::int64_t parameters = 0, gradients = 0, optimizer = 0;  ///< as allocated
  std::int64_t padding = 0;                                   ///< bytes of these for padding elements
  struct OnTier {
    std::int64_t parameters = 0, gradients = 0, optimizer = 0;
  };
  std::array<OnTier, tier_count> tiers;  ///< the same bytes, by the tier that holds them
  /// Bytes of weights, master weights and optimizer state that are requested on nvme, and how many of them
  /// stay in host memory (tranche.host_state).
  std::int64_t asked_on_nvme = 0, stay_in_host = 0;
  /// Elements of flat buffers whose optimizer state this rank keeps, and how many of them are offloaded.
  std::int64_t kept_elements = 0, moved_elements = 0;
};

}  // namespace tranche
