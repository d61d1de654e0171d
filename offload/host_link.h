#pragma once
/// The link between device memory and host memory (PCIe): one copy stream and one meter for each direction.
/// On devices whose memory is the host's the speed can be set, so that overlap can be tested without a GPU.

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "tranche/device/device.h"

namespace tranche {
class TraceRecorder;
}

namespace tranche::detail {

struct HostLinkOptions {
  /// The speed of each direction; 0: as fast as the device copies. Only for devices whose memory the host may
  /// access (and meta, where it has no effect); InvalidArgument elsewhere.
  double bytes_per_second = 0;
  TraceRecorder* trace = nullptr;  ///< copies are spans of the streams "to host" and "from host"
};

/// The bytes requested since the link was made; the same on every device kind, meta included.
struct HostLinkCounts {
  std::int64_t bytes_to_host = 0;
  std::int64_t bytes_from_host = 0;
  std::int64_t copies = 0;
};

/// Used by the issuing thread. Its copies are ordered only by events; if an event has failed, the copies that
/// wait for it fail.
class HostLink {
 public:
  /// `device` outlives the link.
  explicit HostLink(Device& device, const HostLinkOptions& options = {});
  /// Waits for the issued copies.
  ~HostLink();
  HostLink(const HostLink&) = delete;
  HostLink& operator=(const HostLink&) = delete;

  /// Copies between device memory and memory of Tier::host (pinned on GPUs), each direction in the order of
  /// issue, once `ready` have passed. Both ranges belong to the copy until the returned event has passed.
  Event copy_to_host(void* host, const void* device, std::int64_t bytes, std::span<const Event> ready);
  Event copy_from_host(void* device, const void* host, std::int64_t bytes, std::span<const Event> ready);

  /// The streams of the copies, for device work that accompanies a copy (statistics of the sent data).
  Stream& to_host_stream();
  Stream& from_host_stream();

  HostLinkCounts counts() const;
  /// The seconds that each direction has been copying since the last call (without waits for events), over
  /// completed copies. 0 on meta.
  struct Busy {
    double to_host = 0, from_host = 0;
  };
  Busy take_busy_seconds();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche::detail
