#include "comm/node/mailbox.h"

#include <cstring>

namespace tranche::comm {

bool Mailbox::push(const Tag& tag, const void* data, std::int64_t bytes) noexcept {
  const std::uint64_t at = written.load(std::memory_order_relaxed);
  if (at - read.load(std::memory_order_acquire) == slots) return false;
  Slot& slot = ring[at % slots];
  slot.tag = tag;
  slot.bytes = bytes;
  std::memcpy(slot.data.data(), data, static_cast<std::size_t>(bytes));
  written.store(at + 1, std::memory_order_release);
  return true;
}

bool Mailbox::pop(Slot& slot) noexcept {
  const std::uint64_t at = read.load(std::memory_order_relaxed);
  if (at == written.load(std::memory_order_acquire)) return false;
  slot = ring[at % slots];
  read.store(at + 1, std::memory_order_release);
  return true;
}

}  // namespace tranche::comm
