#pragma once
/// The staging buffer of a rank: one allocation, cut in slots that operations take in turn. Private to comm/.

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "tranche/core/dtype.h"
#include "tranche/device/memory.h"

namespace tranche::comm {

/// Two slots, so that one chunk is exchanged while another is summed; one when the staging buffer is too
/// small for two. While the oldest reduction of the rank holds no slot, the last free one is kept for it. So
/// however late some ranks are with some operations, the oldest always finds a slot on every rank, and no
/// circle of waiting can form.
class StagingBuffer {
 public:
  /// Nothing is allocated for one rank. Throws ConfigurationError when 256 fp32 elements from each peer do
  /// not fit. `memory` null: heap.
  StagingBuffer(MemoryResource* memory, std::int64_t bytes, int ranks);

  /// Bytes for 256 fp32 elements from each peer.
  static constexpr std::int64_t least_bytes(int ranks) { return std::int64_t{256} * 4 * (ranks - 1); }
  std::int64_t slot_bytes() const noexcept { return slot_bytes_; }
  /// A reduction that will ask for slots; `order` is its place in the rank's sequence of operations.
  void enlist(std::uint64_t order) { users_.emplace(order, 0); }
  void retire(std::uint64_t order) { users_.erase(order); }
  /// A slot's number, or -1 when there is none for this reduction now.
  int take(std::uint64_t order);
  void release(int slot, std::uint64_t order);
  void* data(int slot) const { return base_ + slot * slot_bytes_; }

 private:
  Buffer buffer_;
  std::unique_ptr<unsigned char[]> heap_;  ///< not touched before it is used
  unsigned char* base_ = nullptr;
  std::int64_t slot_bytes_ = 0;
  std::vector<int> free_;
  std::map<std::uint64_t, int> users_;  ///< slots held, by order
};

/// Elements of each piece that a reduction over `ranks` exchanges at once: equal on all ranks that were given
/// the same staging buffer size. `bucket_elements` bounds the elements of all ranks together; 0 leaves it to
/// the staging buffer.
std::int64_t reduction_chunk(std::int64_t slot_bytes, int ranks, DataType dtype,
                             std::int64_t bucket_elements);

}  // namespace tranche::comm
