#pragma once
/// A ring of control messages in shared memory, from one rank to another. Private to comm/.

#include <array>
#include <atomic>
#include <cstdint>

#include "comm/transport/transport.h"

namespace tranche::comm {

/// A ring for a single producer and a single consumer. It lies in the memory of the rank that reads it, and
/// memory of zeros is an empty one. It holds no address and no lock, since two processes map it.
struct Mailbox {
  static constexpr std::uint64_t slots = 16;
  static constexpr std::int64_t max_bytes = 96;  ///< of a message
  struct alignas(64) Slot {
    Tag tag;
    std::int64_t bytes;
    std::array<unsigned char, max_bytes> data;
  };
  alignas(64) std::atomic<std::uint64_t> written;
  alignas(64) std::atomic<std::uint64_t> read;
  std::array<Slot, slots> ring;

  /// False when it is full. `bytes` is at most `max_bytes`.
  bool push(const Tag& tag, const void* data, std::int64_t bytes) noexcept;
  /// False when it is empty.
  bool pop(Slot& slot) noexcept;
};

}  // namespace tranche::comm
