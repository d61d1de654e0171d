#pragma once
/// One direction between a pair of ranks: bytes divided into messages. Private to comm/.

#include <cstdint>
#include <deque>
#include <memory>

#include "comm/transport/transport.h"

namespace tranche::comm {

/// Sends or receives the bytes of one pair of ranks as messages in order, with a few of them in flight.
class Flow {
 public:
  Flow(bool sending, int peer, void* data, std::int64_t bytes, std::int64_t message_bytes, const Tag& tag);
  Flow(Flow&&) = default;
  Flow& operator=(Flow&&) = default;
  Flow(const Flow&) = delete;
  Flow& operator=(const Flow&) = delete;
  bool advance(Transport& transport);
  bool finished() const { return completed_ == messages_; }
  /// The number of completed messages, counted from the first.
  std::int64_t completed() const { return completed_; }
  int peer() const { return peer_; }
  void abandon() { window_.clear(); }

 private:
  bool sending_;
  int peer_;
  unsigned char* data_;
  std::int64_t bytes_, message_bytes_, messages_;
  Tag tag_;
  std::int64_t posted_ = 0, completed_ = 0;
  std::deque<std::unique_ptr<Message>> window_;
};

}  // namespace tranche::comm
