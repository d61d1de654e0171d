/// Messages of a line of ranks by ncclSend and ncclRecv. NCCL runs what one communicator is given in order,
/// whatever the streams. So each neighbour and direction has a communicator of two ranks, on a stream of its
/// own, and a send never waits behind a receive. Messages lie in no host memory and in no buffer of ours.
#include <cuda_runtime_api.h>

#include <map>
#include <utility>
#include <vector>

#include "comm/nccl/nccl_group.h"
#include "tranche/core/error.h"

namespace tranche::comm {

namespace {

constexpr OperationLabel channel_label{"", "start", Traffic::control, Tier::host};
/// A receive occupies its blocks until the message has come. Four channels of so many leave most of a GPU to
/// the kernels that the peer's message waits for.
constexpr int channel_blocks = 8;

class NcclLine : public DeviceExchange {
 public:
  explicit NcclLine(const DeviceGroup& group) : group_(group) {
    // Nobody waits for one neighbour while another waits for it: all ids are on their way before the first is
    // awaited, and all communicators begin before the first is joined.
    std::map<Key, ncclUniqueId> ids;
    std::vector<Event> passed;
    for (const int peer : group.neighbours()) {
      ncclUniqueId& mine = ids[{peer, true}] = make_nccl_id();
      ncclUniqueId& theirs = ids[{peer, false}];
      passed.push_back(group.host->send(&mine, sizeof(mine), DataType::uint8, peer, {}, channel_label));
      passed.push_back(group.host->recv(&theirs, sizeof(theirs), DataType::uint8, peer, {}, channel_label));
    }
    for (const Event& event : passed) event.wait();
    for (const auto& [key, id] : ids) {
      channels_[key] =
          std::make_unique<NcclGroup>(group, id, 2, key.second ? sender : receiver, channel_blocks);
    }
    for (auto& [key, channel] : channels_) channel->join();
  }

  Issued message(const std::shared_ptr<const DeviceCall>& call, const Event&, Stream& stream) override {
    const bool sending = call->name == "send";
    NcclGroup& channel = *channels_.at({call->other, sending});
    if (const auto bytes = static_cast<std::size_t>(call->bytes()); bytes > 0) {
      channel.make_current();
      const StreamSpan span(stream, call->what());
      const auto native = static_cast<cudaStream_t>(stream.native_handle());
      channel.launch(sending ? "ncclSend" : "ncclRecv", [&](ncclComm_t communicator, auto&& say) {
        say(sending ? ncclSend(call->from, bytes, ncclUint8, receiver, communicator, native)
                    : ncclRecv(call->to, bytes, ncclUint8, sender, communicator, native));
      });
    }
    Issued issued;
    issued.done = stream.record();
    issued.sending = sending;
    issued.abortable = true;
    issued.awaited = group_.job_rank(call->other);
    return issued;
  }

  void check() override {
    for (auto& [key, channel] : channels_) channel->check();
  }
  void abort() noexcept override {
    for (auto& [key, channel] : channels_) channel->abort();
  }
  void close() noexcept override {
    for (auto& [key, channel] : channels_) channel->begin_close();
    for (auto& [key, channel] : channels_) channel->end_close();
  }

 private:
  using Key = std::pair<int, bool>;  ///< the neighbour, and whether this rank sends
  static constexpr int sender = 0, receiver = 1;

  DeviceGroup group_;
  std::map<Key, std::unique_ptr<NcclGroup>> channels_;
};

}  // namespace

std::unique_ptr<DeviceExchange> make_nccl_line(const DeviceGroup& group) {
  return std::make_unique<NcclLine>(group);
}

}  // namespace tranche::comm
