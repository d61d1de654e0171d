#include "comm/node/control_channel.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

namespace tranche::comm {

class ControlChannel::Sending : public Message {
 public:
  Sending(ControlChannel& channel, std::uint64_t number) : channel_(&channel), number_(number) {}
  bool test() override {
    channel_->flush();
    return number_ < channel_->sent_ - channel_->waiting_.size();
  }

 private:
  ControlChannel* channel_;
  std::uint64_t number_;
};

class ControlChannel::Receiving : public Message {
 public:
  Receiving(ControlChannel& channel, void* data, std::int64_t bytes, const Tag& tag)
      : channel_(&channel), data_(data), bytes_(bytes), tag_(tag) {}
  bool test() override { return channel_->take(data_, bytes_, tag_); }

 private:
  ControlChannel* channel_;
  void* data_;
  std::int64_t bytes_;
  Tag tag_;
};

void ControlChannel::flush() {
  bool pushed = false;
  while (!waiting_.empty()) {
    const Mailbox::Slot& first = waiting_.front();
    if (!out_->push(first.tag, first.data.data(), first.bytes)) break;
    waiting_.pop_front();
    pushed = true;
  }
  if (pushed) segment_->notify();
}

std::unique_ptr<Message> ControlChannel::send(const void* data, std::int64_t bytes, const Tag& tag) {
  if (bytes > Mailbox::max_bytes) throw LogicError(fmt::format("a control message of {} bytes", bytes));
  Mailbox::Slot message{};
  message.tag = tag;
  message.bytes = bytes;
  std::memcpy(message.data.data(), data, static_cast<std::size_t>(bytes));
  waiting_.push_back(message);
  const std::uint64_t number = sent_++;
  flush();
  return std::make_unique<Sending>(*this, number);
}

std::unique_ptr<Message> ControlChannel::receive(void* data, std::int64_t bytes, const Tag& tag) {
  return std::make_unique<Receiving>(*this, data, bytes, tag);
}

bool ControlChannel::take(void* data, std::int64_t bytes, const Tag& tag) {
  for (Mailbox::Slot message; in_->pop(message);) arrived_.push_back(message);
  const auto found = std::find_if(arrived_.begin(), arrived_.end(),
                                  [&](const Mailbox::Slot& message) { return message.tag == tag; });
  if (found == arrived_.end()) return false;
  const Mailbox::Slot message = *found;
  arrived_.erase(found);
  if (message.bytes != bytes) {
    throw CommunicationError(
        fmt::format("rank {} sent {} bytes where rank {} expects {}: the ranks' calls differ", peer_,
                    message.bytes, self_, bytes));
  }
  std::memcpy(data, message.data.data(), static_cast<std::size_t>(bytes));
  return true;
}

}  // namespace tranche::comm
