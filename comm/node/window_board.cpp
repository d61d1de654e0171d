#include "comm/node/window_board.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cstring>

namespace tranche::comm {

bool NoteRing::push(const Tag& tag, const void* data, std::int64_t bytes) noexcept {
  const std::uint64_t at = written.load(std::memory_order_relaxed);
  if (at - read.load(std::memory_order_acquire) == slots) return false;
  Slot& slot = ring[at % slots];
  slot.tag = tag;
  slot.bytes = bytes;
  std::memcpy(slot.data.data(), data, static_cast<std::size_t>(bytes));
  written.store(at + 1, std::memory_order_release);
  return true;
}

bool NoteRing::pop(Slot& slot) noexcept {
  const std::uint64_t at = read.load(std::memory_order_relaxed);
  if (at == written.load(std::memory_order_acquire)) return false;
  slot = ring[at % slots];
  read.store(at + 1, std::memory_order_release);
  return true;
}

// std::atomic::wait is for the threads of one process.
void ring(WindowBoard& board) noexcept {
  board.rings.fetch_add(1);
  if (board.sleepers.load() == 0) return;
  syscall(SYS_futex, &board.rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void BoardBell::sleep(std::uint32_t heard, std::chrono::microseconds longest) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(longest);
  const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(longest - seconds);
  const timespec time{static_cast<time_t>(seconds.count()), static_cast<long>(nanoseconds.count())};
  // Announced before the futex looks at the count: who rings in between is seen by it, who rings later sees
  // the sleeper.
  board_.sleepers.fetch_add(1);
  syscall(SYS_futex, &board_.rings, FUTEX_WAIT, heard, &time, nullptr, 0);
  board_.sleepers.fetch_sub(1);
}

}  // namespace tranche::comm
