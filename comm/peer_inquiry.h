#pragma once
/// Lets ranks of a device communicator find out their peers' calls. Private to comm/.

#include <cstdint>
#include <string_view>

namespace tranche::comm {

/// Calls that a device carries out send no messages on the host communicator, so it records them: a rank that
/// waits for long asks its peers, and a peer that will never issue the call replies so.
class PeerInquiry {
 public:
  virtual ~PeerInquiry() = default;
  /// Records that this rank has issued its device call `number` (0 is the first), a collective one.
  virtual void note_device_call(std::string_view name, std::string_view unit, std::uint64_t number) = 0;
  /// Sends all peers the call in which this rank waits. From any thread; never blocks.
  virtual void ask_peers(std::string_view name, std::string_view unit, std::uint64_t number) noexcept = 0;
};

}  // namespace tranche::comm
