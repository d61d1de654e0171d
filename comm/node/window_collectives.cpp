#include "comm/node/window_collectives.h"

#include <algorithm>
#include <cstring>

#include "device/large_copy.h"

namespace tranche::comm {

namespace {

/// Bytes of a member that all ranks gather before they go on to the next: of all members together they fit
/// the caches that a socket's cores share.
constexpr std::int64_t piece_bytes = std::int64_t{1} << 20;

void copy(void* to, const void* from, std::int64_t bytes, bool streamed) {
  if (bytes == 0 || to == from) return;
  if (streamed) {
    copy_past_caches(to, from, bytes);
  } else {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
}

}  // namespace

WindowGather::WindowGather(OperationInfo info, WindowCall call, void* full)
    : WindowExchange(std::move(info), std::move(call)), full_(static_cast<unsigned char*>(full)) {}

void WindowGather::fill(std::int64_t chunk, unsigned char* slot) {
  const std::int64_t width = size_of(call().dtype);
  copy(slot, static_cast<const unsigned char*>(call().mine) + first_of(chunk) * width,
       elements_of(chunk) * width, false);
}

// Piece by piece of all members: those that read a piece after the first find it in the cache that they
// share. Each rank begins with its own, so that not all read the same member at once.
WindowExchange::Progress WindowGather::work(std::int64_t chunk) {
  const std::int64_t width = size_of(call().dtype);
  const std::int64_t total = call().count * width, first = first_of(chunk) * width;
  const std::int64_t bytes = elements_of(chunk) * width;
  const bool streamed = total * ranks() >= streamed_gather_bytes;
  const std::int64_t copies = std::max<std::int64_t>((bytes + piece_bytes - 1) / piece_bytes, 1) * ranks();
  for (std::int64_t moved = 0; moved < quantum_bytes && copied_ < copies; ++copied_) {
    const int member = static_cast<int>((call().self + copied_) % ranks());
    const std::int64_t from = copied_ / ranks() * piece_bytes, some = std::min(piece_bytes, bytes - from);
    unsigned char* to = full_ + member * total + first + from;
    if (member == call().self) {
      copy(to, static_cast<const unsigned char*>(call().mine) + first + from, some, streamed);
    } else {
      const PeerMapping source = map_chunk(member, chunk, first + from, from);
      if (source.data() == nullptr) return Progress::waits;
      copy(to, source.data(), some, streamed);
    }
    moved += some;
  }
  if (copied_ < copies) return Progress::moved;
  copied_ = 0;
  return Progress::done;
}

WindowAllReduce::WindowAllReduce(OperationInfo info, WindowCall call, Combine combine)
    : WindowExchange(std::move(info), std::move(call)),
      combine_(std::move(combine)),
      copied_(static_cast<std::size_t>(ranks())) {}

std::pair<std::int64_t, std::int64_t> WindowAllReduce::slice(int member, std::int64_t chunk) const {
  const std::int64_t elements = elements_of(chunk);
  // Multiples of a cache line, so that no two ranks write one.
  const std::int64_t part = ((elements + ranks() - 1) / ranks() + 15) / 16 * 16;
  const std::int64_t first = std::min(member * part, elements);
  return {first, std::min(part, elements - first)};
}

void WindowAllReduce::fill(std::int64_t chunk, unsigned char* slot) {
  const std::int64_t width = size_of(call().dtype);
  copy(slot, static_cast<const unsigned char*>(call().mine) + first_of(chunk) * width,
       elements_of(chunk) * width, false);
}

WindowExchange::Progress WindowAllReduce::work(std::int64_t chunk) {
  const std::int64_t width = size_of(call().dtype), first = first_of(chunk) * width;
  const auto map_peer = [&](int member, std::int64_t offset) {
    return map_chunk(member, chunk, first + offset * width, offset * width);
  };
  const auto own_at = [&](std::int64_t offset) { return own(chunk, first + offset * width, offset * width); };
  if (!combined_) {
    const auto [begin, count] = slice(call().self, chunk);
    if (count > 0) {
      std::vector<PeerMapping> mappings;
      std::vector<const void*> pieces(static_cast<std::size_t>(ranks()));
      mappings.reserve(pieces.size());
      for (int member = 0; member < ranks(); ++member) {
        if (member == call().self) {
          pieces[static_cast<std::size_t>(member)] = own_at(begin);
          continue;
        }
        mappings.push_back(map_peer(member, begin));
        if (mappings.back().data() == nullptr) return Progress::waits;
        pieces[static_cast<std::size_t>(member)] = mappings.back().data();
      }
      // In place: nobody else reads this rank's part of its own slice.
      combine_(pieces, own_at(begin), count);
    }
    combined_ = true;
    announce_ready(chunk);
  }
  auto* values = static_cast<unsigned char*>(call().mine) + first;
  bool all = true, moved = false;
  for (int member = 0; member < ranks(); ++member) {
    if (copied_[static_cast<std::size_t>(member)]) continue;
    const auto [begin, count] = slice(member, chunk);
    if (member == call().self) {
      copy(values + begin * width, own_at(begin), count * width, false);
    } else {
      all &= ready(member, chunk);
      if (!ready(member, chunk)) continue;
      const PeerMapping source = map_peer(member, begin);
      if (source.data() == nullptr) return Progress::waits;
      copy(values + begin * width, source.data(), count * width, false);
    }
    copied_[static_cast<std::size_t>(member)] = moved = true;
  }
  if (!all) return moved ? Progress::moved : Progress::waits;
  combined_ = false;
  std::fill(copied_.begin(), copied_.end(), false);
  return Progress::done;
}

}  // namespace tranche::comm
