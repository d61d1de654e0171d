#pragma once
#include <cstdint>

namespace tranche {

/// Bytes that one step requested to move between tiers, on one rank; the same on the meta device.
struct OffloadTraffic {
  std::int64_t to_host = 0;    ///< device to host memory: gradients and saved activations
  std::int64_t from_host = 0;  ///< host to device memory: weights and saved activations
  std::int64_t nvme_read = 0;  ///< including padding to 4096
  std::int64_t nvme_written = 0;
};

/// Seconds for which each resource of offloading was busy since the step before, on this rank. They overlap
/// each other and the compute: a step cannot be shorter than the longest of them and the compute.
struct OffloadSeconds {
  double to_host = 0;
  double from_host = 0;
  double host_update = 0;
  double disk = 0;
};

}  // namespace tranche
