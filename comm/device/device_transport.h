#pragma once
/// The choice of how device memory travels between ranks. Private to the library.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "tranche/comm/backends.h"
#include "tranche/device/device.h"

namespace tranche::comm {

/// The ways in which device memory travels between ranks. automatic: shared for ranks that are threads of one
/// process on one device; nccl when it was compiled in and every rank has a GPU of its own; staged otherwise.
enum class DeviceTransport : std::uint8_t { automatic, nccl, staged, shared };
/// "auto", "nccl", "staged", "shared".
std::string_view name_of(DeviceTransport transport);
/// The inverse; throws ConfigurationError naming the four.
DeviceTransport device_transport_of(std::string_view name);

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

/// A rank's own description, exchanged before a transport is chosen.
struct DevicePlace {
  std::uint64_t process = 0;  ///< equal for ranks of one process only
  std::string node;           ///< its name
  std::string nccl_node;      ///< the node as NCCL sees it: NCCL_HOSTID, or else the node's name
  std::string gpu;            ///< PCI bus id, or its number without NCCL; empty for other devices
  int index = 0;              ///< of the device in its process
};
/// The transport for ranks at these places, the same on every rank. Throws as make_device_communicator does.
DeviceTransport choose_transport(DeviceTransport wanted, std::span<const DevicePlace> places, bool has_nccl);

}  // namespace tranche::comm
