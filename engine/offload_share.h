#pragma once
/// Chooses the units that are offloaded if only a share of the optimizer's state is, and the state that stays
/// in host memory though it is requested on nvme.

#include <cstdint>
#include <span>
#include <vector>

#include "tranche/config/offload.h"

namespace tranche::detail {

/// `padded_elements`: those of each unit's trainable flat buffer, in forward order; `ratio`: the share to
/// offload, 0 to 1. Only whole units are offloaded, so that at least `ratio` is. The units at the beginning
/// of a forward pass stay on the device, because their gradients are computed last and their weights are
/// needed first.
std::vector<bool> units_that_move(std::span<const std::int64_t> padded_elements, double ratio);

/// The host memory for state that is requested on nvme and stays in host memory (tranche.host_state). Buffers
/// are offered in the order of use: all weights, of which the disk would move most for each byte, before all
/// optimizer state.
class HostHomes {
 public:
  explicit HostHomes(const OffloadConfig& offload)
      : bytes_(offload.host_state_bytes()), weights_(offload.most_weights_in_host) {}
  /// Takes the bytes and returns true if the whole buffer fits.
  bool take_weights(std::int64_t elements, std::int64_t bytes);
  bool take_state(std::int64_t bytes);

 private:
  std::int64_t bytes_, weights_;  ///< bytes, and elements of weights, that may still be taken
};

}  // namespace tranche::detail
