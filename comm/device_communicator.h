#pragma once
/// The communicator of device memory that host code may not access: its collectives are ordered on streams.
/// Private to the library.

#include <cstdint>
#include <memory>

#include "comm/device/device_transport.h"
#include "comm/rank_names.h"
#include "tranche/comm/backends.h"
#include "tranche/comm/communicator.h"
#include "tranche/device/device.h"

namespace tranche {
class TraceRecorder;
}

namespace tranche::comm {

struct DeviceCommunicatorOptions {
  DeviceTransport transport = DeviceTransport::automatic;
  /// `tranche.collectives: nccl`: NCCL itself reduces, and the bits depend on its algorithm. Only with nccl.
  bool library_collectives = false;
  double timeout_seconds = 300;
  std::int64_t staging_bytes =
      8 << 20;  ///< device staging buffer (nccl) or host staging (staged), taken at construction
  MemoryResource* device_memory = nullptr;  ///< Category::communication; null: the device's own
  MemoryResource* host_memory = nullptr;
  TraceRecorder* trace = nullptr;  ///< for the communication stream, not owned
  RankNames rank_names;            ///< ranks of the job, for error texts
  /// The host communicator has no thread of its own. This is refused, because device work ends while no call
  /// is made.
  bool inline_progress = false;
};

/// Wraps `host`, a communicator over the same ranks. Calls whose label says Tier::host, all_reduce, barrier
/// and split go to it directly. The other collectives are enqueued on a communication stream after their
/// ready events, in the order of the calls (so a late ready event delays the later calls), and done is a
/// point of that stream: the host does not wait for the device. Each peer and direction has its own stream
/// for send and recv, so that messages wait only for earlier ones of the same kind. Shared ranks meet on the
/// host while a call is issued. One meter and one sequence hash count calls of both kinds, as the host
/// communicators do.
///
/// send and recv: as in Communicator. With shared, recv waits on the host until the peer has called send.
/// With nccl, ncclSend and ncclRecv carry the messages of a line() on communicators of two ranks, whose
/// memory no ledger counts; messages of other groups pass through host memory. Collective over host's ranks.
/// Throws ConfigurationError when the requested transport cannot serve the ranks, naming the obstacle's
/// ranks, or when more than four of them are threads on one GPU; NotCompiled for nccl without TRANCHE_NCCL.
/// `device` outlives the communicator.
std::unique_ptr<Communicator> make_device_communicator(Device& device, std::unique_ptr<Communicator> host,
                                                       const DeviceCommunicatorOptions& options = {});

}  // namespace tranche::comm
