#pragma once
/// Elements of a unit's state in memory, wherever that is. Private to engine/.

#include <cstddef>
#include <vector>

#include "partition/flat_layout.h"
#include "tranche/device/stream.h"

namespace tranche {

/// A stretch of a unit's master weights and optimizer state: each the address of element range.begin.
struct Stretch {
  ElementRange range;
  std::byte* master = nullptr;
  std::vector<std::byte*> state;
  Stream* stream = nullptr;  ///< for kernels that work on it
  bool on_host = false;
};

/// The same as an update sees it.
struct UpdateMemory {
  ElementRange range;
  std::byte* gradient = nullptr;
  std::byte* master = nullptr;
  std::vector<std::byte*> state;
  std::byte* weight = nullptr;  ///< null: master is the weight
};

}  // namespace tranche
