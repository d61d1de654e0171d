#include "comm/node/window_all_gather.h"

#include <algorithm>
#include <cstring>

#include "device/large_copy.h"

namespace tranche::comm {

namespace {

/// The bytes of a member that all ranks gather before the next such part: over all members they fit the
/// caches that a socket's cores share.
constexpr std::int64_t piece_bytes = std::int64_t{1} << 20;

void copy(void* to, const void* from, std::int64_t bytes, bool streamed) {
  if (bytes == 0 || to == from) return;
  if (streamed) {
    detail::copy_past_caches(to, from, bytes);
  } else {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
}

}  // namespace

WindowAllGather::WindowAllGather(OperationInfo info, WindowCall call, void* full)
    : WindowExchange(std::move(info), std::move(call)), full_(static_cast<unsigned char*>(full)) {}

void WindowAllGather::fill(std::int64_t chunk, unsigned char* slot) {
  const std::int64_t width = size_of(call().dtype);
  copy(slot, static_cast<const unsigned char*>(call().mine) + first_of(chunk) * width,
       elements_of(chunk) * width, false);
}

// Copies part by part from all members: ranks that read a part after the first find it in the shared cache.
// Each rank begins with its own, so that the ranks do not all read the same member at once.
WindowExchange::Progress WindowAllGather::work(std::int64_t chunk) {
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

}  // namespace tranche::comm
