#pragma once
/// send and recv of device memory through pinned host memory, for transports without their own. Private to
/// comm/.

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "comm/device/device_exchange.h"

namespace tranche::comm {

/// A message passes through two slots of host memory in pieces: one piece is sent while another is copied.
/// Each peer and direction has its own slots. They are allocated at its first message, or at once for the
/// neighbours of a line, and are kept until the end: freeing pinned memory may wait for all work of the GPU.
/// That work may include a recv whose peer waits for a send that this rank has not issued yet.
class HostMessages {
 public:
  /// Collective. The messages have a separate host communicator, because the streams' threads use it.
  explicit HostMessages(const DeviceGroup& group);
  /// A send blocks `channel` until the peer has received the bytes, a recv until they have arrived.
  Issued issue(const std::shared_ptr<const DeviceCall>& call, Stream& channel);
  /// Takes the slots of a neighbour.
  void connect(int peer);

 private:
  using Slots = std::array<Buffer, 2>;
  struct Progress;
  Slots& slots_of(int peer, bool sending);
  void send(const std::shared_ptr<const DeviceCall>& call, Stream& channel);
  void receive(const std::shared_ptr<const DeviceCall>& call, Stream& channel);
  /// Posts piece `number` of a message to the host communicator. Called on a channel's thread.
  Event post(const DeviceCall& call, bool sending, std::int64_t number, void* slot);
  std::int64_t piece_elements(const DeviceCall& call) const { return slot_bytes_ / size_of(call.dtype); }
  std::int64_t pieces_of(const DeviceCall& call) const;

  DeviceGroup group_;
  std::unique_ptr<Communicator> host_;
  std::mutex mutex_;  ///< guards host_, which all channels call
  std::int64_t slot_bytes_;
  std::map<std::pair<int, bool>, Slots> slots_;
};

/// Makes the exchange of a line of ranks: only messages, through host memory. Collective.
std::unique_ptr<DeviceExchange> make_host_line(const DeviceGroup& group);

/// Waits on the host and throws when the group fails.
void wait_on_host(const Event& done, const DeviceFailure& failure, const std::string& what);
/// Runs host work of a stream; its failure becomes the group's, with its cause.
void run_guarded(const std::shared_ptr<DeviceFailure>& failure, Communicator& host, const std::string& what,
                 const std::function<void()>& work);

}  // namespace tranche::comm
