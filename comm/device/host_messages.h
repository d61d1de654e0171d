#pragma once
/// send and recv of device memory through pinned host memory, for exchanges without their own. Private to
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

/// A message passes two slots of host memory in pieces: one piece crosses while another is copied. Each peer
/// and direction has slots of its own, taken at its first message or at once for the neighbours of a line,
/// and kept until the end: giving pinned memory back may wait for all work of the GPU. A recv may be part of
/// that work, and its peer may wait for a send that this rank has not issued yet.
class HostMessages {
 public:
  /// Collective. The messages have a host communicator of their own, because the streams' threads use it.
  explicit HostMessages(const DeviceGroup& group);
  /// A send holds `channel` up until the peer has taken the bytes, a recv until they have come.
  Issued issue(const std::shared_ptr<const DeviceCall>& call, Stream& channel);
  /// Takes the slots of a neighbour.
  void connect(int peer);

 private:
  using Slots = std::array<Buffer, 2>;
  struct Progress;
  Slots& slots_of(int peer, bool sending);
  void send(const std::shared_ptr<const DeviceCall>& call, Stream& channel);
  void receive(const std::shared_ptr<const DeviceCall>& call, Stream& channel);
  /// Hands piece `number` of a message to the host communicator. On a channel's thread.
  Event post(const DeviceCall& call, bool sending, std::int64_t number, void* slot);
  std::int64_t piece_elements(const DeviceCall& call) const { return slot_bytes_ / size_of(call.dtype); }
  std::int64_t pieces_of(const DeviceCall& call) const;

  DeviceGroup group_;
  std::unique_ptr<Communicator> host_;
  std::mutex mutex_;  ///< calls of host_, by all channels
  std::int64_t slot_bytes_;
  std::map<std::pair<int, bool>, Slots> slots_;
};

/// For a line of ranks: messages through host memory alone. Collective.
std::unique_ptr<DeviceExchange> make_host_line(const DeviceGroup& group);

/// Waits on the host, noticing the failure of the group.
void wait_on_host(const Event& done, const DeviceFailure& failure, const std::string& what);
/// Runs a piece of host work of a stream; a failure becomes the group's, with its cause.
void run_guarded(const std::shared_ptr<DeviceFailure>& failure, Communicator& host, const std::string& what,
                 const std::function<void()>& work);

}  // namespace tranche::comm
