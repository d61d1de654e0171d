#pragma once
/// The three collectives among ranks that read each other's memory.

#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "comm/node/window_exchange.h"

namespace tranche::comm {

/// full = the members' shards.
class WindowGather : public WindowExchange {
 public:
  WindowGather(OperationInfo info, WindowCall call, void* full);

 private:
  void fill(std::int64_t chunk, unsigned char* slot) override;
  Progress work(std::int64_t chunk) override;
  unsigned char* full_;
  std::int64_t copied_ = 0;  ///< pieces of the chunk
};

/// values = their combination over the members, in rank order: each rank combines a slice of every chunk
/// where it lies, then all copy the others' slices.
class WindowAllReduce : public WindowExchange {
 public:
  using Combine = std::function<void(std::span<const void* const> pieces, void* result, std::int64_t count)>;
  WindowAllReduce(OperationInfo info, WindowCall call, Combine combine);

 private:
  void fill(std::int64_t chunk, unsigned char* slot) override;
  Progress work(std::int64_t chunk) override;
  bool two_phases() const override { return true; }
  /// Elements of a chunk that a member combines.
  std::pair<std::int64_t, std::int64_t> slice(int member, std::int64_t chunk) const;
  Combine combine_;
  bool combined_ = false;
  std::vector<bool> copied_;  ///< by member
};

/// The sizes from which sums, and the bytes that all members gather, are written past the caches.
inline constexpr std::int64_t streamed_bytes = 1 << 20, streamed_gather_bytes = 4 << 20;

}  // namespace tranche::comm
