#include "comm/device/host_messages.h"

#include <algorithm>
#include <vector>

#include "tranche/core/error.h"
#include "tranche/core/shape.h"

namespace tranche::comm {

namespace {

/// The largest request that the slab of pinned memory serves; it needs no allocation while the GPU works.
constexpr std::int64_t slab_bytes = 64 << 10;
/// A line allocates its slots before there is work, so they can be larger and fewer, larger pieces are sent.
constexpr std::int64_t line_slot_bytes = 256 << 10;

class HostLine : public DeviceExchange {
 public:
  explicit HostLine(const DeviceGroup& group) : messages_(group) {}
  bool watched() const override { return false; }  // the host communicator keeps the deadlines
  Issued message(const std::shared_ptr<const DeviceCall>& call, const Event&, Stream& channel) override {
    return messages_.issue(call, channel);
  }
  void connect(int peer) override { messages_.connect(peer); }

 private:
  HostMessages messages_;
};

}  // namespace

void wait_on_host(const Event& done, const DeviceFailure& failure, const std::string& what) {
  while (!done.wait_for(0.02)) failure.check(what);
}

void run_guarded(const std::shared_ptr<DeviceFailure>& failure, Communicator& host, const std::string& what,
                 const std::function<void()>& work) {
  try {
    failure->check(what);
    work();
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    try {
      host.check_health();  // reports the cause without the operation that met it
      failure->fail(what, error);
    } catch (...) {
      failure->fail(what, std::current_exception());
    }
    std::rethrow_exception(error);
  }
}

/// The pending host operations of a message, by slot. Only the channel's thread uses it.
struct HostMessages::Progress {
  std::array<Event, 2> pieces;
};

HostMessages::HostMessages(const DeviceGroup& group)
    : group_(group),
      host_(group.host->split(0, group.rank())),
      slot_bytes_(group.line ? line_slot_bytes : slab_bytes) {
  for (const int peer : group_.neighbours()) connect(peer);
}

void HostMessages::connect(int peer) {
  for (const bool sending : {false, true}) (void)slots_of(peer, sending);
}

HostMessages::Slots& HostMessages::slots_of(int peer, bool sending) {
  Slots& slots = slots_[{peer, sending}];
  for (Buffer& slot : slots) {
    if (slot.data() != nullptr) continue;
    slot = Buffer(*group_.host_memory, slot_bytes_, Category::communication, "messages");
  }
  return slots;
}

std::int64_t HostMessages::pieces_of(const DeviceCall& call) const {
  // An empty message is sent as one empty piece.
  return std::max<std::int64_t>(1, divide_round_up(call.count, piece_elements(call)));
}

Event HostMessages::post(const DeviceCall& call, bool sending, std::int64_t number, void* slot) {
  const std::int64_t first = number * piece_elements(call);
  const std::int64_t count = std::min(piece_elements(call), call.count - first);
  const std::lock_guard lock(mutex_);
  return sending ? host_->send(slot, count, call.dtype, call.other, {}, call.label())
                 : host_->recv(slot, count, call.dtype, call.other, {}, call.label());
}

void HostMessages::send(const std::shared_ptr<const DeviceCall>& call, Stream& channel) {
  Slots& slots = slots_of(call->other, true);
  const auto progress = std::make_shared<Progress>();
  const std::int64_t piece = piece_elements(*call), pieces = pieces_of(*call), width = size_of(call->dtype);
  for (std::int64_t number = 0; number < pieces; ++number) {
    const auto at = static_cast<std::size_t>(number % 2);
    void* const slot = slots[at].data();
    const std::int64_t first = number * piece, count = std::min(piece, call->count - first);
    if (count > 0) {
      group_.device->copy_to_host(channel, slot, call->from_bytes() + first * width, count * width);
    }
    channel.enqueue(call->what(), [this, call, progress, number, pieces, at, slot] {
      run_guarded(group_.failure, *host_, call->what(), [&] {
        progress->pieces[at] = post(*call, true, number, slot);
        // The next piece overwrites the other slot, so its send must be done; after the last piece both must
        // be.
        wait_on_host(progress->pieces[1 - at], *group_.failure, call->what());
        if (number + 1 == pieces) wait_on_host(progress->pieces[at], *group_.failure, call->what());
      });
    });
  }
}

void HostMessages::receive(const std::shared_ptr<const DeviceCall>& call, Stream& channel) {
  Slots& slots = slots_of(call->other, false);
  const auto progress = std::make_shared<Progress>();
  const std::int64_t piece = piece_elements(*call), pieces = pieces_of(*call), width = size_of(call->dtype);
  for (std::int64_t number = 0; number < pieces; ++number) {
    const auto at = static_cast<std::size_t>(number % 2);
    void* const slot = slots[at].data();
    void* const next = slots[1 - at].data();
    channel.enqueue(call->what(), [this, call, progress, number, pieces, at, slot, next] {
      run_guarded(group_.failure, *host_, call->what(), [&] {
        if (number == 0) progress->pieces[at] = post(*call, false, number, slot);
        // The other slot is free, because this work is ordered after the copy of its last piece to the
        // device.
        if (number + 1 < pieces) progress->pieces[1 - at] = post(*call, false, number + 1, next);
        wait_on_host(progress->pieces[at], *group_.failure, call->what());
      });
    });
    const std::int64_t first = number * piece, count = std::min(piece, call->count - first);
    if (count == 0) continue;
    group_.device->copy_from_host(channel, call->to_bytes() + first * width, slot, count * width);
  }
}

Issued HostMessages::issue(const std::shared_ptr<const DeviceCall>& call, Stream& channel) {
  const bool sending = call->name == "send";
  sending ? send(call, channel) : receive(call, channel);
  Issued issued;
  issued.done = channel.record();
  issued.sending = sending;
  return issued;
}

std::unique_ptr<DeviceExchange> make_host_line(const DeviceGroup& group) {
  return std::make_unique<HostLine>(group);
}

}  // namespace tranche::comm
