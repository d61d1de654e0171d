#pragma once
/// All-gather among ranks that read each other's memory. Private to comm/.

#include <cstdint>

#include "comm/node/window_exchange.h"

namespace tranche::comm {

/// full = the members' shards.
class WindowAllGather : public WindowExchange {
 public:
  WindowAllGather(OperationInfo info, WindowCall call, void* full);

 private:
  void fill(std::int64_t chunk, unsigned char* slot) override;
  Progress work(std::int64_t chunk) override;
  unsigned char* full_;
  std::int64_t copied_ = 0;  ///< parts of the current chunk
};

/// Gathered bytes are written past the caches from this size on, over all members.
inline constexpr std::int64_t streamed_gather_bytes = 4 << 20;

}  // namespace tranche::comm
