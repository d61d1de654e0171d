#include "comm/node/peer_mapping.h"

#include <utility>

namespace tranche::comm {

PeerMapping::PeerMapping(Transport& transport, int rank, const MemoryRegistration& registration)
    : transport_(&transport),
      rank_(rank),
      registration_(registration),
      data_(static_cast<const unsigned char*>(transport.map_peer(rank, registration))) {}

PeerMapping::~PeerMapping() {
  if (data_ != nullptr) transport_->unmap_peer(rank_, registration_);
}

PeerMapping::PeerMapping(PeerMapping&& other) noexcept
    : transport_(other.transport_),
      rank_(other.rank_),
      registration_(other.registration_),
      data_(std::exchange(other.data_, nullptr)) {}

}  // namespace tranche::comm
