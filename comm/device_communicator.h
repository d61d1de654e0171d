#pragma once
/// The communicator of device memory, which host code may not touch: collectives ordered on streams. Private
/// to the library.

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
  /// `tranche.collectives: nccl`: reductions by NCCL itself, whose bits depend on its algorithm. Only with
  /// nccl.
  bool library_collectives = false;
  double timeout_seconds = 300;
  std::int64_t staging_bytes =
      8 << 20;  ///< device staging buffer (nccl) or host staging (staged), taken at construction
  MemoryResource* device_memory = nullptr;  ///< Category::communication; null: the device's own
  MemoryResource* host_memory = nullptr;
  TraceRecorder* trace = nullptr;  ///< of the communication stream, not owned
  RankNames rank_names;            ///< of the job, for error texts
  /// The host communicator has no thread of its own; refused, since device work ends while no call is made.
  bool inline_progress = false;
};

/// Wraps `host`, a communicator over the same ranks. Calls whose label says Tier::host, all_reduce, barrier
/// and split go straight to it. The other collectives are enqueued on a communication stream behind their
/// ready events, in the order of the calls (so one whose ready event is late holds up those behind it), and
/// done is a point of that stream: the host waits for nothing of the device. Each peer and direction has a
/// stream of its own for send and recv, so that messages wait for nothing but earlier ones of the same kind.
/// Shared ranks meet on the host while a call is issued. One meter and one sequence hash count calls of both
/// kinds, as the host communicators do.
///
/// send and recv: as in Communicator. With shared, recv waits on the host until the peer has called send.
/// With nccl, ncclSend and ncclRecv carry the messages of a line() on communicators of two ranks, which take
/// no memory of the ledger; those of other groups pass through host memory. Collective over host's ranks.
/// Throws ConfigurationError when the transport asked for cannot serve them, saying which ranks stand in the
/// way, or when more than four of them are threads on one GPU; NotCompiled for nccl without TRANCHE_NCCL.
/// `device` outlives the communicator.
std::unique_ptr<Communicator> make_device_communicator(Device& device, std::unique_ptr<Communicator> host,
                                                       const DeviceCommunicatorOptions& options = {});

}  // namespace tranche::comm
