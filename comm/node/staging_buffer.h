#pragma once
/// The staging buffer of a rank: one allocation, divided into slots that operations use in turn. Private to
/// comm/.

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "tranche/core/dtype.h"
#include "tranche/device/memory.h"

namespace tranche::comm {

/// Has two slots, so that one chunk is exchanged while another is summed, or one when the buffer is too small
/// for two. While the rank's oldest reduction holds no slot, the last free one is reserved for it. So,
/// however late some ranks are with some operations, the oldest always finds a slot on every rank, and no
/// cyclic wait can form.
///
///     slot: free --take()--> filled and exchanged --all parts summed, or read by all peers--> release()
class StagingBuffer {
 public:
  /// Allocates nothing for one rank. Throws ConfigurationError when 256 fp32 elements from each peer do not
  /// fit. `memory` null: heap.
  StagingBuffer(MemoryResource* memory, std::int64_t bytes, int ranks);

  /// The bytes of 256 fp32 elements from each peer.
  static constexpr std::int64_t least_bytes(int ranks) { return std::int64_t{256} * 4 * (ranks - 1); }
  std::int64_t slot_bytes() const noexcept { return slot_bytes_; }
  /// Registers a reduction that will take slots; `order` is its place in the rank's sequence of operations.
  void enlist(std::uint64_t order) { users_.emplace(order, 0); }
  void retire(std::uint64_t order) { users_.erase(order); }
  /// A slot's number, or -1 when none is available to this reduction now.
  int take(std::uint64_t order);
  void release(int slot, std::uint64_t order);
  void* data(int slot) const { return base_ + slot * slot_bytes_; }

 private:
  Buffer buffer_;
  std::unique_ptr<unsigned char[]> heap_;  ///< pages are not touched before use
  unsigned char* base_ = nullptr;
  std::int64_t slot_bytes_ = 0;
  std::vector<int> free_;
  std::map<std::uint64_t, int> users_;  ///< the number of slots held, by order
};

/// The number of elements of each rank's part that a reduction over `ranks` exchanges at once: equal on all
/// ranks with the same staging buffer size. `bucket_elements` limits the elements of all ranks together; 0
/// means that only the staging buffer limits them.
std::int64_t reduction_chunk(std::int64_t slot_bytes, int ranks, DataType dtype,
                             std::int64_t bucket_elements);

}  // namespace tranche::comm
