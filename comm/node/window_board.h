#pragma once
/// The beginning of a window's file: what the ranks of a node write for each other. Private to comm/.

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "comm/transport/transport.h"

namespace tranche::comm {

/// Notes of one rank to another, in the memory of the one that reads them. One thread writes, one reads;
/// zeros are an empty one.
struct NoteRing {
  static constexpr std::uint64_t slots = 16;
  static constexpr std::int64_t largest = 96;  ///< bytes of a note
  struct alignas(64) Slot {
    Tag tag;
    std::int64_t bytes;
    std::array<unsigned char, largest> data;
  };
  alignas(64) std::atomic<std::uint64_t> written;
  alignas(64) std::atomic<std::uint64_t> read;
  std::array<Slot, slots> ring;

  /// False when it is full. `bytes` at most `largest`.
  bool push(const Tag& tag, const void* data, std::int64_t bytes) noexcept;
  /// False when it is empty.
  bool pop(Slot& slot) noexcept;
};

/// Lies in memory of several processes, so nothing in it may hold an address or a lock. Behind it in the file
/// are the rings of what the other ranks of the node write to this one, taken page by page when touched.
struct WindowBoard {
  static constexpr std::int64_t file_bytes = 1 << 20, first_ring = 4096;
  static constexpr int most_neighbours = (file_bytes - first_ring) / static_cast<int>(sizeof(NoteRing));

  std::uint64_t token = 0;  ///< tells peers that they have opened the right file
  /// A futex: counts what others have sent to this rank, and who of its threads sleeps.
  alignas(64) std::atomic<std::uint32_t> rings{0};
  std::atomic<std::uint32_t> sleepers{0};

  /// By the number of the sender among the ranks of the node.
  NoteRing& notes_from(int local) {
    return reinterpret_cast<NoteRing*>(reinterpret_cast<unsigned char*>(this) + first_ring)[local];
  }
};
static_assert(std::atomic<std::int64_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<std::uint32_t>) == 4);
static_assert(sizeof(WindowBoard) <= WindowBoard::first_ring);

/// Wakes the threads that sleep at a board's bell.
void ring(WindowBoard& board) noexcept;

/// The bell of the own board.
class BoardBell : public Bell {
 public:
  explicit BoardBell(WindowBoard& board) : board_(board) {}
  std::uint32_t rings() const override { return board_.rings.load(); }
  void sleep(std::uint32_t heard, std::chrono::microseconds longest) override;

 private:
  WindowBoard& board_;
};

}  // namespace tranche::comm
