#pragma once
/// The beginning of a rank's window, which the other ranks of its node map for writing. Private to comm/.

#include <atomic>
#include <cstdint>

#include "comm/node/mailbox.h"

namespace tranche::comm {

/// Several processes map it, so nothing in it may hold an address or a lock.
/// Behind it in the file are the mailboxes of the other ranks of the node, whose pages are taken when
/// touched.
struct ControlSegment {
  static constexpr std::int64_t file_bytes = 1 << 20, first_mailbox = 4096;
  static constexpr int max_neighbours = (file_bytes - first_mailbox) / static_cast<int>(sizeof(Mailbox));

  std::uint64_t token = 0;  ///< tells peers that they have opened the right file
  /// A futex: how often the rank was notified.
  alignas(64) std::atomic<std::uint32_t> notifications{0};
  std::atomic<std::uint32_t> waiters{0};  ///< threads of the rank that sleep on the futex

  /// Wakes the rank's waiters.
  void notify() noexcept;
  /// The mailbox of a sender, by its number among the ranks of the node.
  Mailbox& mailbox_from(int local) {
    return reinterpret_cast<Mailbox*>(reinterpret_cast<unsigned char*>(this) + first_mailbox)[local];
  }
};
static_assert(std::atomic<std::int64_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<std::uint32_t>) == 4);
static_assert(sizeof(ControlSegment) <= ControlSegment::first_mailbox);

}  // namespace tranche::comm
