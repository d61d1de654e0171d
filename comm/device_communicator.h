#pragma once
/// Collectives on the memory of a device that host code may not touch, ordered on streams.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "tranche/comm/backends.h"
#include "tranche/comm/communicator.h"
#include "tranche/device/device.h"

namespace tranche {

class TraceRecorder;

/// How device memory travels between ranks. automatic: shared for ranks that are threads of one process on
/// one device; nccl when it was compiled in and every rank has a GPU of its own; staged otherwise.
enum class DeviceTransport : std::uint8_t { automatic, nccl, staged, shared };
/// "auto", "nccl", "staged", "shared".
std::string_view name_of(DeviceTransport transport);
/// The inverse; throws ConfigurationError naming the four.
DeviceTransport device_transport_of(std::string_view name);

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
  /// The host communicator has no thread of its own; refused, since device work ends while no call is made.
  bool inline_progress = false;
};

/// The transports that the configuration's `tranche.device_transport` and `tranche.collectives` (auto, ours,
/// messages, shared, nccl) ask for. Throws ConfigurationError, naming the key, on what is not known or does
/// not go together.
struct CollectiveChoice {
  DeviceTransport transport = DeviceTransport::automatic;
  bool by_library = false;  ///< reductions by the transport's own library, whose bits are its own
  NodeCollectives node = NodeCollectives::automatic;  ///< ours is auto by its older name
};
CollectiveChoice collective_choice(std::string_view transport, std::string_view collectives);
/// Throws ConfigurationError when reductions by a library are asked for on a device that has none.
void require_library_collectives(const CollectiveChoice& choice, DeviceKind device);
/// For the numerics fingerprint: "" or "; reductions by NCCL 2.28.9".
std::string reductions_of(const CollectiveChoice& choice);

/// Wraps `host`, a communicator over the same ranks. Calls whose label says Tier::host, all_reduce, barrier
/// and split go straight to it. The others are enqueued on a communication stream behind their ready events,
/// in the order of the calls (so one whose ready event is late holds up those behind it), and done is a point
/// of that stream: the host waits for nothing of the device. Shared ranks meet on the host while a call is
/// issued. One meter and one sequence hash count calls of both kinds, as the host communicators do.
///
/// send and recv: as in Communicator; with shared, recv waits on the host until the peer has called send.
/// Collective over host's ranks. Throws ConfigurationError when the transport asked for cannot serve them,
/// saying which ranks stand in the way, or when more than four of them are threads on one GPU; NotCompiled
/// for nccl without TRANCHE_NCCL. `device` outlives the communicator.
std::unique_ptr<Communicator> make_device_communicator(Device& device, std::unique_ptr<Communicator> host,
                                                       const DeviceCommunicatorOptions& options = {});

/// A rank's own description, exchanged before a transport is chosen.
struct DevicePlace {
  std::uint64_t process = 0;  ///< equal for ranks of one process only
  std::string node;           ///< its name
  std::string nccl_node;      ///< what NCCL takes for it: NCCL_HOSTID, or else the node
  std::string gpu;            ///< PCI bus id, or its number without NCCL; empty for other devices
  int index = 0;              ///< of the device in its process
};
/// The transport for ranks at these places, the same on every rank. Throws as make_device_communicator does.
DeviceTransport choose_transport(DeviceTransport wanted, std::span<const DevicePlace> places, bool has_nccl);

}  // namespace tranche
