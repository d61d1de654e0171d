#pragma once
/// The beginning of a rank's window, which the other ranks of its node map for writing. Private to comm/.

#include <atomic>
#include <cstdint>

namespace tranche::comm {

/// Several processes map it, so it must not contain an address or a lock.
struct ControlSegment {
  static constexpr std::int64_t file_bytes = 4096;

  std::uint64_t token = 0;  ///< lets peers check that they opened the right file
  /// A futex word: the number of notifications of the rank.
  alignas(64) std::atomic<std::uint32_t> notifications{0};
  std::atomic<std::uint32_t> waiters{0};  ///< the rank's threads that sleep on the futex

  /// Wakes the rank's waiters.
  void notify() noexcept;
};
static_assert(sizeof(std::atomic<std::uint32_t>) == 4);
static_assert(sizeof(ControlSegment) <= ControlSegment::file_bytes);

}  // namespace tranche::comm
