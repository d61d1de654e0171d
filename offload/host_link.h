#pragma once
/// The link between device memory and host memory (PCIe): one copy stream each way, a meter, and on devices
/// whose memory is the host's a speed that can be set, so that overlap can be tested without a GPU.

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
  /// Each way; 0: as fast as the device copies. Only for devices whose memory the host may touch (and meta,
  /// where it means nothing); InvalidArgument elsewhere.
  double bytes_per_second = 0;
  TraceRecorder* trace = nullptr;  ///< copies are spans of the streams "to host" and "from host"
};

/// Bytes asked for since the link was made; the same on every device kind, meta included.
struct HostLinkCounts {
  std::int64_t bytes_to_host = 0;
  std::int64_t bytes_from_host = 0;
  std::int64_t copies = 0;
};

/// Used by the issuing thread. Its copies are ordered by events alone; a failed event makes the copies behind
/// it fail.
class HostLink {
 public:
  /// `device` outlives the link.
  explicit HostLink(Device& device, const HostLinkOptions& options = {});
  /// Waits for what was issued.
  ~HostLink();
  HostLink(const HostLink&) = delete;
  HostLink& operator=(const HostLink&) = delete;

  /// Copies between device memory and memory of Tier::host (pinned on GPUs), each way in the order of issue,
  /// once `ready` have passed. Both ranges belong to the copy until the returned event has passed.
  Event copy_to_host(void* host, const void* device, std::int64_t bytes, std::span<const Event> ready);
  Event copy_from_host(void* device, const void* host, std::int64_t bytes, std::span<const Event> ready);

  /// The streams of the copies each way, for device work that goes with a copy (statistics of what is sent).
  Stream& to_host_stream();
  Stream& from_host_stream();

  HostLinkCounts counts() const;
  /// Seconds that each way has been copying since the last call (waits for events not included); from the
  /// copies that have completed. 0 on meta.
  struct Busy {
    double to_host = 0, from_host = 0;
  };
  Busy take_busy_seconds();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche::detail
