#include "comm/transport/flow.h"

#include <algorithm>

#include "tranche/core/shape.h"

namespace tranche::comm {

namespace {
/// The number of messages of one flow in flight: enough to hide the handshake of one behind the data of
/// another.
constexpr std::size_t flow_window = 4;
}  // namespace

Flow::Flow(bool sending, int peer, void* data, std::int64_t bytes, std::int64_t message_bytes, const Tag& tag)
    : sending_(sending),
      peer_(peer),
      data_(static_cast<unsigned char*>(data)),
      bytes_(bytes),
      message_bytes_(std::max<std::int64_t>(message_bytes, 1)),
      // A flow of no bytes is one empty message, as barriers use.
      messages_(std::max<std::int64_t>(divide_round_up(bytes, message_bytes_), 1)),
      tag_(tag) {}

bool Flow::advance(Transport& transport) {
  bool moved = false;
  for (;;) {
    while (!window_.empty() && window_.front()->test()) {
      window_.pop_front();
      ++completed_;
      moved = true;
    }
    if (posted_ == messages_ || window_.size() == flow_window) return moved;
    const std::int64_t first = posted_ * message_bytes_;
    const std::int64_t bytes = std::min(message_bytes_, bytes_ - first);
    unsigned char* data = data_ == nullptr ? nullptr : data_ + first;
    window_.push_back(sending_ ? transport.send(data, bytes, peer_, tag_)
                               : transport.receive(data, bytes, peer_, tag_));
    ++posted_;
    moved = true;
  }
}

}  // namespace tranche::comm
