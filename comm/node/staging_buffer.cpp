#include "comm/node/staging_buffer.h"

#include <algorithm>

#include <fmt/format.h>

#include "comm/transport/transport.h"
#include "tranche/core/error.h"
#include "tranche/core/shape.h"

namespace tranche::comm {

StagingBuffer::StagingBuffer(MemoryResource* memory, std::int64_t bytes, int ranks) {
  if (ranks < 2) return;
  const std::int64_t least = least_bytes(ranks);
  if (bytes < least) {
    throw ConfigurationError(
        fmt::format("a staging buffer of {} bytes cannot hold 256 fp32 elements from each of {} peers; give "
                    "tranche.communication_slab (staging_bytes in C++) at least {}",
                    bytes, ranks - 1, least));
  }
  if (memory != nullptr) {
    buffer_ = Buffer(*memory, bytes, Category::communication, "staging buffer");
    base_ = static_cast<unsigned char*>(buffer_.data());
  } else {
    heap_ = std::make_unique_for_overwrite<unsigned char[]>(static_cast<std::size_t>(bytes));
    base_ = heap_.get();
  }
  const int slots = bytes / 2 / memory_alignment * memory_alignment >= least ? 2 : 1;
  slot_bytes_ = slots == 2 ? bytes / 2 / memory_alignment * memory_alignment : bytes;
  for (int slot = slots - 1; slot >= 0; --slot) free_.push_back(slot);
}

int StagingBuffer::take(std::uint64_t order) {
  if (free_.empty()) return -1;
  if (free_.size() == 1 && !users_.empty()) {
    const auto& [oldest, held] = *users_.begin();
    if (oldest != order && held == 0) return -1;
  }
  const int slot = free_.back();
  free_.pop_back();
  ++users_[order];
  return slot;
}

void StagingBuffer::release(int slot, std::uint64_t order) {
  free_.push_back(slot);
  --users_[order];
}

std::int64_t reduction_chunk(std::int64_t slot_bytes, int ranks, DataType dtype,
                             std::int64_t bucket_elements) {
  std::int64_t chunk = std::min(slot_bytes / std::max(1, ranks - 1), largest_message_bytes) / size_of(dtype);
  chunk = std::max<std::int64_t>(chunk / 64 * 64, 1);
  if (bucket_elements > 0) chunk = std::min(chunk, std::max<std::int64_t>(bucket_elements / ranks, 1));
  return chunk;
}

}  // namespace tranche::comm
