#pragma once
/// The arguments of a collective among ranks that read each other's memory. Private to comm/.

#include <cstdint>
#include <optional>
#include <vector>

#include "comm/transport/transport.h"
#include "tranche/core/dtype.h"

namespace tranche::comm {

/// The call as one rank makes it.
struct WindowCall {
  std::vector<int> members;  ///< job ranks of the group, in group order
  int self = 0;              ///< this rank's index in members
  void* mine = nullptr;      ///< this rank's memory that peers read
  std::int64_t mine_bytes = 0;
  std::int64_t count = 0;  ///< elements per rank, as in the call
  std::int64_t chunk = 0;  ///< elements of each member's part in a slot; equal on all ranks
  DataType dtype = DataType::float32;
  /// The registration of the readable memory; nullopt if it lies outside of the window, so that it is copied
  /// through the staging buffer.
  std::optional<MemoryRegistration> registration;
  Transport* transport = nullptr;
};

}  // namespace tranche::comm
