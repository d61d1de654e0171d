#pragma once
/// The arguments of a collective among ranks that read each other's memory. Private to comm/.

#include <cstdint>
#include <optional>
#include <vector>

#include "comm/transport/transport.h"
#include "tranche/core/dtype.h"

namespace tranche::comm {

/// One call of a rank.
struct WindowCall {
  std::vector<int> members;  ///< job ranks of the group, in group order
  int self = 0;              ///< index in members
  void* mine = nullptr;      ///< this rank's memory that peers read
  std::int64_t mine_bytes = 0;
  std::int64_t count = 0;  ///< elements per rank, as in the call
  std::int64_t chunk = 0;  ///< elements that a slot holds of each piece; equal on all ranks
  DataType dtype = DataType::float32;
  /// Named to peers as it is; nullopt: it lies outside of the window and is copied through the staging
  /// buffer.
  std::optional<MemoryRegistration> registration;
  Transport* transport = nullptr;
};

}  // namespace tranche::comm
