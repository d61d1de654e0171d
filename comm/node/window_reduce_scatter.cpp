#include "comm/node/window_reduce_scatter.h"

#include <algorithm>
#include <cstring>

namespace tranche::comm {

WindowReduceScatter::WindowReduceScatter(OperationInfo info, WindowCall call, Output output, int givers,
                                         Combine combine)
    : WindowExchange(std::move(info), std::move(call)),
      output_(output),
      givers_(std::min(givers, ranks())),
      combine_(std::move(combine)) {}

// A slot holds the parts for the other members in order, without this rank's own.
void WindowReduceScatter::fill(std::int64_t chunk, unsigned char* slot) {
  const std::int64_t width = size_of(call().dtype), bytes = elements_of(chunk) * width;
  for (int member = 0; member < ranks(); ++member) {
    if (member == call().self || bytes == 0) continue;
    const auto* piece =
        static_cast<const unsigned char*>(call().mine) + (member * call().count + first_of(chunk)) * width;
    std::memcpy(slot, piece, static_cast<std::size_t>(bytes));
    slot += bytes;
  }
}

WindowExchange::Progress WindowReduceScatter::work(std::int64_t chunk) {
  const std::int64_t width = size_of(call().dtype), elements = elements_of(chunk);
  const int self = call().self;
  const std::int64_t quantum = std::max<std::int64_t>(quantum_bytes / (width * ranks()) / 64 * 64, 64);
  const std::int64_t count = std::min(quantum, elements - summed_);
  const std::int64_t direct = (self * call().count + first_of(chunk) + summed_) * width;
  std::vector<PeerMapping> mappings;
  std::vector<const void*> pieces(static_cast<std::size_t>(givers_));
  mappings.reserve(pieces.size());
  for (int member = 0; member < givers_; ++member) {
    if (member == self) {
      pieces[static_cast<std::size_t>(member)] = static_cast<const unsigned char*>(call().mine) + direct;
      continue;
    }
    const int place = self < member ? self : self - 1;  // index of our part in that member's slot
    mappings.push_back(map_chunk(member, chunk, direct, (place * elements + summed_) * width));
    if (mappings.back().data() == nullptr) return Progress::waits;
    pieces[static_cast<std::size_t>(member)] = mappings.back().data();
  }
  combine_(pieces, static_cast<unsigned char*>(output_.data) + (first_of(chunk) + summed_) * output_.width,
           count);
  summed_ += count;
  if (summed_ < elements) return Progress::moved;
  summed_ = 0;
  return Progress::done;
}

}  // namespace tranche::comm
