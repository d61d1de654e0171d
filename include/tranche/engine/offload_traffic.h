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

/// Seconds since the step before in which this rank had no transfer between memory and disk in flight, by the
/// first reason that held. With OffloadSeconds::disk they add up to the time since then.
struct DiskIdleSeconds {
  double nothing_asked = 0;  ///< neither of the others
  double no_buffer = 0;      ///< a read waited for memory or bytes that were still in use
  double norm = 0;  ///< a tile of state was in memory, and its update could not be issued: the ranks had not
                    ///< agreed on the step, or (tranche.update: as_reduced) its gradient was not complete
};

}  // namespace tranche
