#include "comm/node/window_all_reduce.h"

#include <algorithm>
#include <cstring>

namespace tranche::comm {

namespace {
void copy_bytes(void* to, const void* from, std::int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}
}  // namespace

WindowAllReduce::WindowAllReduce(OperationInfo info, WindowCall call, Combine combine)
    : WindowExchange(std::move(info), std::move(call)),
      combine_(std::move(combine)),
      copied_(static_cast<std::size_t>(ranks())) {}

std::pair<std::int64_t, std::int64_t> WindowAllReduce::slice(int member, std::int64_t chunk) const {
  const std::int64_t elements = elements_of(chunk);
  // Slices are multiples of a cache line, so that no two ranks write to the same line.
  const std::int64_t part = ((elements + ranks() - 1) / ranks() + 15) / 16 * 16;
  const std::int64_t first = std::min(member * part, elements);
  return {first, std::min(part, elements - first)};
}

void WindowAllReduce::fill(std::int64_t chunk, unsigned char* slot) {
  const std::int64_t width = size_of(call().dtype);
  copy_bytes(slot, static_cast<const unsigned char*>(call().mine) + first_of(chunk) * width,
             elements_of(chunk) * width);
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
      // The result is written in place: no other rank reads this rank's part of its own slice.
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
      copy_bytes(values + begin * width, own_at(begin), count * width);
    } else {
      all &= ready(member, chunk);
      if (!ready(member, chunk)) continue;
      const PeerMapping source = map_peer(member, begin);
      if (source.data() == nullptr) return Progress::waits;
      copy_bytes(values + begin * width, source.data(), count * width);
    }
    copied_[static_cast<std::size_t>(member)] = moved = true;
  }
  if (!all) return moved ? Progress::moved : Progress::waits;
  combined_ = false;
  std::fill(copied_.begin(), copied_.end(), false);
  return Progress::done;
}

}  // namespace tranche::comm
