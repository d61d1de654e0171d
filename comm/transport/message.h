#pragma once
/// A nonblocking message between two ranks. Private to comm/.

#include <cstdint>

namespace tranche::comm {

/// Identifies messages between a pair of ranks. Messages with equal tags match in the order in which they
/// were posted.
struct Tag {
  int context = 0;              ///< the communicator; unique among those that two ranks share
  bool point_to_point = false;  ///< send and recv, or a collective
  std::uint64_t sequence = 0;   ///< of the collective, or of the pair
  std::uint32_t call = 0;       ///< hash_of_call of a collective, so that different calls do not match
  friend bool operator==(const Tag&, const Tag&) = default;
};

/// The tag of a control message, which matches no other message of the same call.
inline Tag control_tag(Tag tag) {
  tag.call ^= 1;
  return tag;
}

/// A message in flight. Destroying it abandons it: the local buffer is not accessed any more.
class Message {
 public:
  virtual ~Message() = default;
  /// True once the buffer may be reused (sent) or read (received). Never blocks. Throws CommunicationError
  /// when the peer's message has another size.
  virtual bool test() = 0;
};

}  // namespace tranche::comm
