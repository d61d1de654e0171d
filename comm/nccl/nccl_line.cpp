/// Sends messages on a line of ranks by ncclSend and ncclRecv. NCCL runs the calls of one communicator in
/// order, whatever the streams. So each neighbour and direction has a communicator of two ranks, on a
/// separate stream, and a send never waits for a receive. Messages use neither host memory nor a buffer of
/// ours.
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/nccl/nccl_group.h"
#include "tranche/core/error.h"

namespace tranche::comm {

namespace {

constexpr OperationLabel channel_label{"", "start", Traffic::control, Tier::host};
/// A receive occupies its thread blocks until the message has arrived. Four channels of this size leave most
/// of a GPU to the kernels that the peer's message waits for.
constexpr int channel_blocks = 8;

class NcclLine : public DeviceExchange {
 public:
  explicit NcclLine(const DeviceGroup& group) : group_(group) { connect(group.neighbours()); }
  void connect(int peer) override { connect(std::vector<int>{peer}); }

  Issued message(const std::shared_ptr<const DeviceCall>& call, const Event&, Stream& stream) override {
    const bool sending = call->name == "send";
    if (call->bytes() > 0) {
      const StreamSpan span(stream, call->what());
      pass({call->other, sending}, sending ? const_cast<void*>(call->from) : call->to, call->bytes(), stream);
    }
    Issued issued;
    issued.done = stream.record();
    issued.sending = sending;
    issued.abortable = true;
    issued.awaited = group_.job_rank(call->other);
    return issued;
  }

  void check() override {
    const std::lock_guard lock(mutex_);
    for (auto& [key, channel] : channels_) channel->check();
  }
  void abort() noexcept override {
    const std::lock_guard lock(mutex_);
    for (auto& [key, channel] : channels_) channel->abort();
  }
  void close() noexcept override {
    for (auto& [key, channel] : channels_) channel->begin_close();
    for (auto& [key, channel] : channels_) channel->end_close();
  }

 private:
  using Key = std::pair<int, bool>;  ///< the neighbour, and true if this rank sends
  static constexpr int sender = 0, receiver = 1;

  void pass(const Key& key, void* data, std::int64_t bytes, Stream& stream) {
    const bool sending = key.second;
    NcclGroup& channel = *channels_.at(key);
    channel.make_current();
    const auto native = static_cast<cudaStream_t>(stream.native_handle());
    channel.launch(sending ? "ncclSend" : "ncclRecv", [&](ncclComm_t communicator, auto&& say) {
      const auto count = static_cast<std::size_t>(bytes);
      say(sending ? ncclSend(data, count, ncclUint8, receiver, communicator, native)
                  : ncclRecv(data, count, ncclUint8, sender, communicator, native));
    });
  }

  /// Nobody waits for one neighbour while another waits for it: all ids are on their way before the first is
  /// awaited, and all communicators begin before the first is joined.
  void connect(const std::vector<int>& peers) {
    std::map<Key, ncclUniqueId> ids;
    std::vector<Event> passed;
    for (const int peer : peers) {
      ncclUniqueId& mine = ids[{peer, true}] = make_nccl_id();
      ncclUniqueId& theirs = ids[{peer, false}];
      passed.push_back(group_.host->send(&mine, sizeof(mine), DataType::uint8, peer, {}, channel_label));
      passed.push_back(group_.host->recv(&theirs, sizeof(theirs), DataType::uint8, peer, {}, channel_label));
    }
    for (const Event& event : passed) event.wait();
    for (const auto& [key, id] : ids) {
      auto made = std::make_unique<NcclGroup>(group_, id, 2, key.second ? sender : receiver, channel_blocks);
      const std::lock_guard lock(mutex_);
      channels_[key] = std::move(made);
    }
    for (const auto& [key, id] : ids) channels_.at(key)->join();
    pass_first_bytes(peers);
  }

  /// NCCL connects two ranks at their first message, and its call returns when both have come. So each
  /// channel passes a byte now. From the front of the line to its end each pair does so forwards, then
  /// backwards.
  void pass_first_bytes(const std::vector<int>& peers) {
    const std::unique_ptr<Stream> stream = group_.device->create_stream("connect");
    const Buffer byte(*group_.device_memory, 1, Category::other, "first byte of a channel");
    for (const int peer : peers) {
      const bool sends_first = peer > group_.rank();
      for (const bool sending : {sends_first, !sends_first}) pass({peer, sending}, byte.data(), 1, *stream);
    }
    const Event done = stream->record();
    while (!done.wait_for(0.02)) {
      group_.failure->check("the first message of each neighbour");
      group_.host->check_health();
    }
  }

  DeviceGroup group_;
  std::mutex mutex_;  ///< guards the map; connect() may extend it while the watch's thread reads it
  std::map<Key, std::unique_ptr<NcclGroup>> channels_;
};

}  // namespace

std::unique_ptr<DeviceExchange> make_nccl_line(const DeviceGroup& group) {
  return std::make_unique<NcclLine>(group);
}

}  // namespace tranche::comm
