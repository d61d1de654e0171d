#pragma once
/// Chooses the transport of device memory between ranks. Private to the library.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "tranche/comm/backends.h"
#include "tranche/device/device.h"

namespace tranche::comm {

/// The transports of device memory between ranks. automatic: shared for ranks that are threads of one process
/// on one device; nccl when it was compiled in and every rank has its own GPU; staged otherwise.
enum class DeviceTransport : std::uint8_t { automatic, nccl, staged, shared };
/// "auto", "nccl", "staged", "shared".
std::string_view name_of(DeviceTransport transport);
/// The inverse of name_of; throws ConfigurationError naming the four.
DeviceTransport device_transport_of(std::string_view name);

/// The transports that `tranche.device_transport` and `tranche.collectives` (auto, ours, messages, shared,
/// nccl) request. Throws ConfigurationError, naming the key, for unknown values and combinations that exclude
/// each other.
struct CollectiveChoice {
  DeviceTransport transport = DeviceTransport::automatic;
  bool by_library = false;  ///< the transport's own library reduces, with its own bits
  NodeCollectives node = NodeCollectives::automatic;  ///< "ours" is an older name of auto
};
CollectiveChoice collective_choice(std::string_view transport, std::string_view collectives);
/// Throws ConfigurationError when a library's reductions are requested on a device that has none.
void require_library_collectives(const CollectiveChoice& choice, DeviceKind device);
/// The part of the numerics fingerprint: "" or "; reductions by NCCL 2.28.9".
std::string reductions_of(const CollectiveChoice& choice);

/// A rank's description of its place, exchanged before a transport is chosen.
struct DevicePlace {
  std::uint64_t process = 0;  ///< equal only for ranks of one process
  std::string node;           ///< the node's name
  std::string nccl_node;      ///< the node as NCCL identifies it: NCCL_HOSTID, or else the node's name
  std::string gpu;            ///< PCI bus id, or its number without NCCL; empty for other devices
  int index = 0;              ///< index of the device in its process
};
/// The transport for ranks at these places, the same on every rank. Throws as make_device_communicator does.
DeviceTransport choose_transport(DeviceTransport wanted, std::span<const DevicePlace> places, bool has_nccl);

}  // namespace tranche::comm
