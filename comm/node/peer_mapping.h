#pragma once
/// A peer's memory, mapped for reading. Private to comm/.

#include "comm/transport/transport.h"

namespace tranche::comm {

/// Maps a peer's memory for reading during the object's lifetime. Null when the peer has failed and
/// deregistered it.
class PeerMapping {
 public:
  PeerMapping(Transport& transport, int rank, const MemoryRegistration& registration);
  ~PeerMapping();
  PeerMapping(PeerMapping&& other) noexcept;
  PeerMapping(const PeerMapping&) = delete;
  PeerMapping& operator=(const PeerMapping&) = delete;
  const unsigned char* data() const { return data_; }

 private:
  Transport* transport_;
  int rank_;
  MemoryRegistration registration_;
  const unsigned char* data_;
};

}  // namespace tranche::comm
