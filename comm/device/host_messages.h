#pragma once
/// send and recv of device memory through pinned host memory, for exchanges without their own. Private to
/// comm/.

#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/device/device_exchange.h"

namespace tranche::comm {

/// A send leaves the stream as soon as its bytes are in host memory, so rings of sends and recvs cannot lock;
/// a recv holds the stream up until its bytes have come. Each takes host memory of its size, in pieces that
/// are kept for later messages until the communicator ends: not for the step.
class HostMessages {
 public:
  /// `host` is used by the stream's work alone.
  HostMessages(const DeviceGroup& group, Communicator& host) : group_(group), host_(host) {}
  ~HostMessages();
  /// `exchange`: the stream on which host work may block.
  Issued send(const std::shared_ptr<const DeviceCall>& call, const Event& started, Stream& exchange);
  Issued receive(const std::shared_ptr<const DeviceCall>& call, Stream& exchange);

 private:
  struct Pending;
  /// Takes the memory of a message.
  std::shared_ptr<Pending> open(const DeviceCall& call);
  void reap();
  DeviceGroup group_;
  Communicator& host_;
  std::list<std::shared_ptr<Pending>> pending_;
  std::vector<Buffer> free_;
};

/// Waits for a host operation from a stream's work: until done, failed, or the device communicator has ended.
void wait_on_host(const Event& done, const DeviceFailure& failure, const std::string& what);
/// Runs `work` and, if it throws, makes it known to the communicator before it goes on to the stream.
void run_guarded(const std::shared_ptr<DeviceFailure>& failure, Communicator& host, const std::string& what,
                 const std::function<void()>& work);

}  // namespace tranche::comm
