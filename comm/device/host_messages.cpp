#include "comm/device/host_messages.h"

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <vector>

#include "core/clock.h"
#include "tranche/core/error.h"

namespace tranche::comm {

namespace {

/// Bytes that travel at once. Pinned memory has so much in its slab: a larger buffer would be registered.
constexpr std::int64_t message_piece_bytes = 64 << 10;

/// The done event of host operations that have not been asked for yet.
class DeferredEvent : public EventState {
 public:
  bool query() override {
    const std::lock_guard lock(mutex_);
    return set_ && std::all_of(events_.begin(), events_.end(), [](const Event& e) { return e.query(); });
  }
  bool wait(double seconds) override {
    const detail::Stopwatch watch;
    {
      std::unique_lock lock(mutex_);
      const auto there = [&] { return set_; };
      if (seconds < 0) {
        changed_.wait(lock, there);
      } else if (!changed_.wait_for(lock, std::chrono::duration<double>(seconds), there)) {
        return false;
      }
    }
    // Once set, the events stay as they are.
    for (const Event& event : events_) {
      if (seconds < 0) {
        event.wait();
      } else if (!event.wait_for(std::max(0.0, seconds - watch.seconds()))) {
        return false;
      }
    }
    return true;
  }
  void set(std::vector<Event> events) {
    {
      const std::lock_guard lock(mutex_);
      events_ = std::move(events);
      set_ = true;
    }
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Event> events_;
  bool set_ = false;
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
      host.check_health();  // knows the cause without the operation that met it
      failure->fail(what, error);
    } catch (...) {
      failure->fail(what, std::current_exception());
    }
    std::rethrow_exception(error);
  }
}

struct HostMessages::Pending {
  struct Piece {
    Buffer buffer;
    std::int64_t count;  ///< elements
    std::int64_t offset, bytes;
  };
  std::vector<Piece> pieces;
  std::shared_ptr<DeferredEvent> taken = std::make_shared<DeferredEvent>();
};

HostMessages::~HostMessages() = default;

// Buffers are kept for later messages: giving pinned memory back may wait for all work of the GPU, and so for
// a recv whose peer waits for the send that is being issued.
void HostMessages::reap() {
  std::erase_if(pending_, [this](const std::shared_ptr<Pending>& each) {
    if (!each->taken->query()) return false;
    for (Pending::Piece& piece : each->pieces) free_.push_back(std::move(piece.buffer));
    return true;
  });
}

std::shared_ptr<HostMessages::Pending> HostMessages::open(const DeviceCall& call) {
  reap();
  auto pending = std::make_shared<Pending>();
  const std::int64_t width = size_of(call.dtype), most = message_piece_bytes / width;
  std::int64_t first = 0;
  do {  // an empty message is one empty piece
    const std::int64_t count = std::min(most, call.count - first);
    if (free_.empty()) {
      free_.emplace_back(*group_.host_memory, message_piece_bytes, Category::communication, "message");
    }
    pending->pieces.push_back({std::move(free_.back()), count, first * width, count * width});
    free_.pop_back();
    first += count;
  } while (first < call.count);
  pending_.push_back(pending);
  return pending;
}

Issued HostMessages::send(const std::shared_ptr<const DeviceCall>& call, const Event& started,
                          Stream& exchange) {
  (void)started;
  const std::shared_ptr<Pending> pending = open(*call);
  for (const Pending::Piece& piece : pending->pieces) {
    group_.device->copy_to_host(*group_.stream, piece.buffer.data(), call->from_bytes() + piece.offset,
                                piece.bytes);
  }
  exchange.wait(group_.stream->record());
  exchange.enqueue(call->name, [this, call, pending] {
    run_guarded(group_.failure, host_, call->what(), [&] {
      std::vector<Event> sent;
      for (const Pending::Piece& piece : pending->pieces) {
        sent.push_back(
            host_.send(piece.buffer.data(), piece.count, call->dtype, call->other, {}, call->label()));
      }
      pending->taken->set(std::move(sent));
    });
  });
  return {Event(pending->taken), {}, true};
}

Issued HostMessages::receive(const std::shared_ptr<const DeviceCall>& call, Stream& exchange) {
  const std::shared_ptr<Pending> pending = open(*call);
  exchange.wait(group_.stream->record());
  exchange.enqueue(call->name, [this, call, pending] {
    run_guarded(group_.failure, host_, call->what(), [&] {
      std::vector<Event> received;
      for (const Pending::Piece& piece : pending->pieces) {
        received.push_back(
            host_.recv(piece.buffer.data(), piece.count, call->dtype, call->other, {}, call->label()));
      }
      for (const Event& event : received) wait_on_host(event, *group_.failure, call->what());
    });
  });
  group_.stream->wait(exchange.record());
  for (const Pending::Piece& piece : pending->pieces) {
    group_.device->copy_from_host(*group_.stream, call->to_bytes() + piece.offset, piece.buffer.data(),
                                  piece.bytes);
  }
  Issued issued;
  issued.done = group_.stream->record();
  pending->taken->set({issued.done});
  return issued;
}

}  // namespace tranche::comm
