#include "comm/node/window_reduce.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "core/clock.h"
#include "tranche/core/shape.h"

namespace tranche::comm {

namespace {

/// Bytes read for a block that a rank claims: what the last one to end makes the others wait for, a few
/// hundredths of a millisecond.
constexpr std::int64_t block_bytes = std::int64_t{1} << 20;
/// More than any call has blocks.
constexpr std::int64_t closed = std::int64_t{1} << 60;

std::int64_t share_block_elements(std::int64_t ranks, DataType dtype) {
  return std::max<std::int64_t>(block_bytes / (size_of(dtype) * ranks) / 64 * 64, 64);
}

}  // namespace

WindowReduce::WindowReduce(OperationInfo info, WindowCall call, Output output, Combine combine)
    : WindowExchange(std::move(info), std::move(call)),
      output_(output),
      combine_(std::move(combine)),
      open_(this->call().offer.share >= 0) {}

WindowReduce::~WindowReduce() {
  // Was not even submitted.
  if (open_) transport().close_share(call().offer.share);
}

void WindowReduce::offer(WindowCall& call, const Output& output, std::int64_t form) {
  call.offer.form = form;
  const auto ranks = static_cast<std::int64_t>(call.members.size());
  if (!call.exposure || call.count < 2 * share_block_elements(ranks, call.dtype)) return;
  const auto place = call.transport->expose(output.data, call.count * output.width);
  if (!place) return;
  call.offer.output = *place;
  call.offer.share = call.transport->open_share();
  if (call.offer.share < 0) call.transport->withdraw(*place);
}

void WindowReduce::close_share() {
  if (!open_) return;
  open_ = false;
  const int number = call().offer.share;
  if (finished() || !told()) {
    transport().close_share(number);
  } else {
    // The call has failed. Nobody begins a block any more; one that is being summed is waited for, so that
    // nothing is written later, but not for ever: who has it may be gone. The number is never used again,
    // since a peer that has not heard of the failure yet may still ask.
    WorkShare& share = *transport().share(call().members[static_cast<std::size_t>(call().self)], number);
    const std::int64_t block = share_block_elements(ranks(), call().dtype);
    const std::int64_t claimed =
        std::min(share.claimed.exchange(closed), divide_round_up(call().count, block));
    const double limit = seconds_now() + 1;
    while (share.ended.load() < claimed && seconds_now() < limit) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  transport().withdraw(call().offer.output);
}

void WindowReduce::abandon(Slab& slab) {
  close_share();
  WindowExchange::abandon(slab);
}

// A lane holds the pieces for the members behind one another, the own one left out.
void WindowReduce::fill(std::int64_t chunk, unsigned char* lane) {
  const std::int64_t width = size_of(call().dtype), bytes = elements_of(chunk) * width;
  for (int member = 0; member < ranks(); ++member) {
    if (member == call().self || bytes == 0) continue;
    const auto* piece =
        static_cast<const unsigned char*>(call().mine) + (member * call().count + first_of(chunk)) * width;
    std::memcpy(lane, piece, static_cast<std::size_t>(bytes));
    lane += bytes;
  }
}

WindowReduce::Block WindowReduce::sum_block_of(int member) {
  const int self = call().self;
  const std::int64_t block = share_block_elements(ranks(), call().dtype);
  const std::int64_t blocks = divide_round_up(call().count, block);
  const int number = offer_of(member).share;
  WorkShare* share = nullptr;
  if (number >= 0) {
    share = transport().share(call().members[static_cast<std::size_t>(member)], number);
    if (share->claimed.load(std::memory_order_relaxed) >= blocks) return Block::none_left;
  } else if (member != self || claimed_ == blocks) {
    return Block::none_left;
  }
  if (offer_of(member).form != call().offer.form) return Block::none_left;
  // All of it is looked up before anything is claimed: what is claimed has to be summed.
  const std::int64_t width = size_of(call().dtype), begin = member * call().count * width;
  std::vector<Look> looks;
  looks.reserve(static_cast<std::size_t>(ranks()) + 1);
  std::vector<const unsigned char*> from(static_cast<std::size_t>(ranks()));
  for (int piece = 0; piece < ranks(); ++piece) {
    if (piece == self) {
      from[static_cast<std::size_t>(piece)] = static_cast<const unsigned char*>(call().mine) + begin;
      continue;
    }
    looks.push_back(look(piece, 0, begin, 0));
    if (looks.back().data() == nullptr) return Block::withdrawn;
    from[static_cast<std::size_t>(piece)] = looks.back().data();
  }
  auto* to = static_cast<unsigned char*>(output_.data);
  if (member != self) {
    looks.push_back(result_of(member, 0));
    to = looks.back().writable();
    if (to == nullptr) return Block::withdrawn;
  }
  const std::int64_t claim = share != nullptr ? share->claimed.fetch_add(1) : claimed_++;
  if (claim >= blocks) return Block::none_left;
  const std::int64_t first = claim * block, count = std::min(block, call().count - first);
  std::vector<const void*> pieces;
  pieces.reserve(from.size());
  for (const unsigned char* each : from) pieces.push_back(each + first * width);
  combine_(pieces, to + first * output_.width, count);
  if (share != nullptr) share->ended.fetch_add(1);
  return Block::summed;
}

WindowExchange::Progress WindowReduce::work_together() {
  for (std::int64_t moved = 0; worked_for_ < ranks(); moved += block_bytes) {
    if (moved >= turn_bytes) return Progress::moved;
    switch (sum_block_of((call().self + worked_for_) % ranks())) {
      case Block::summed:
        break;
      case Block::none_left:
        ++worked_for_;
        moved -= block_bytes;
        break;
      case Block::withdrawn:
        return Progress::waits;
    }
  }
  return Progress::done;
}

WindowExchange::Progress WindowReduce::work(std::int64_t chunk) {
  if (all_direct()) return chunk == 0 ? work_together() : Progress::done;
  const std::int64_t width = size_of(call().dtype), elements = elements_of(chunk);
  const int self = call().self;
  const std::int64_t turn = std::max<std::int64_t>(turn_bytes / (width * ranks()) / 64 * 64, 64);
  const std::int64_t count = std::min(turn, elements - summed_);
  const std::int64_t direct = (self * call().count + first_of(chunk) + summed_) * width;
  std::vector<Look> looks;
  std::vector<const void*> pieces(static_cast<std::size_t>(ranks()));
  looks.reserve(pieces.size());
  for (int member = 0; member < ranks(); ++member) {
    if (member == self) {
      pieces[static_cast<std::size_t>(member)] = static_cast<const unsigned char*>(call().mine) + direct;
      continue;
    }
    const int place = self < member ? self : self - 1;  // among the pieces of that member's lane
    looks.push_back(look(member, chunk, direct, (place * elements + summed_) * width));
    if (looks.back().data() == nullptr) return Progress::waits;
    pieces[static_cast<std::size_t>(member)] = looks.back().data();
  }
  combine_(pieces, static_cast<unsigned char*>(output_.data) + (first_of(chunk) + summed_) * output_.width,
           count);
  summed_ += count;
  if (summed_ < elements) return Progress::moved;
  summed_ = 0;
  return Progress::done;
}

}  // namespace tranche::comm
