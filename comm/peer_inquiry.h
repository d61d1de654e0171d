#pragma once
/// How a communicator over a device lets ranks find out what their peers' calls are. Private to comm/.

#include <cstdint>
#include <string_view>

namespace tranche::comm {

/// Calls that a device carries out send no messages of the host communicator beside it, which keeps the
/// record of them: a rank that waits for long asks its peers, and one that will never issue the call says so.
class PeerInquiry {
 public:
  virtual ~PeerInquiry() = default;
  /// This rank has issued its device call `number` (0 is the first), a collective one.
  virtual void note_device_call(std::string_view name, std::string_view unit, std::uint64_t number) = 0;
  /// Tells all peers that this rank waits in that call. From any thread; never blocks.
  virtual void ask_peers(std::string_view name, std::string_view unit, std::uint64_t number) noexcept = 0;
};

}  // namespace tranche::comm
