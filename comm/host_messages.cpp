#include "tranche/comm/host_messages.h"

#include <condition_variable>
#include <functional>

#include "tranche/core/clock.h"
#include "tranche/core/error.h"

namespace tranche::comm {

namespace {

/// The done event of a host operation that has not been asked for yet.
class DeferredEvent : public EventState {
 public:
  bool query() override {
    const std::lock_guard lock(mutex_);
    return set_ && event_.query();
  }
  bool wait(double seconds) override {
    const Stopwatch watch;
    {
      std::unique_lock lock(mutex_);
      const auto there = [&] { return set_; };
      if (seconds < 0) {
        changed_.wait(lock, there);
      } else if (!changed_.wait_for(lock, std::chrono::duration<double>(seconds), there)) {
        return false;
      }
    }
    if (seconds < 0) {
      event_.wait();
      return true;
    }
    return event_.wait_for(std::max(0.0, seconds - watch.seconds()));
  }
  void set(Event event) {
    {
      const std::lock_guard lock(mutex_);
      event_ = std::move(event);
      set_ = true;
    }
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  Event event_;
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
  Buffer buffer;
  std::shared_ptr<DeferredEvent> taken = std::make_shared<DeferredEvent>();
};

HostMessages::~HostMessages() = default;

void HostMessages::reap() {
  std::erase_if(pending_, [](const auto& each) { return each->taken->query(); });
}

Issued HostMessages::send(const std::shared_ptr<const DeviceCall>& call, const Event& started,
                          Stream& exchange) {
  (void)started;
  reap();
  auto pending = std::make_shared<Pending>();
  pending->buffer = Buffer(*group_.host_memory, call->bytes(), Category::communication, "message");
  pending_.push_back(pending);
  group_.device->copy_to_host(*group_.stream, pending->buffer.data(), call->from, call->bytes());
  exchange.wait(group_.stream->record());
  exchange.enqueue(call->name, [this, call, pending] {
    run_guarded(group_.failure, host_, call->what(), [&] {
      pending->taken->set(
          host_.send(pending->buffer.data(), call->count, call->dtype, call->other, {}, call->label()));
    });
  });
  return {Event(pending->taken), {}, true};
}

Issued HostMessages::receive(const std::shared_ptr<const DeviceCall>& call, Stream& exchange) {
  reap();
  auto pending = std::make_shared<Pending>();
  pending->buffer = Buffer(*group_.host_memory, call->bytes(), Category::communication, "message");
  pending_.push_back(pending);
  exchange.wait(group_.stream->record());
  exchange.enqueue(call->name, [this, call, pending] {
    run_guarded(group_.failure, host_, call->what(), [&] {
      wait_on_host(
          host_.recv(pending->buffer.data(), call->count, call->dtype, call->other, {}, call->label()),
          *group_.failure, call->what());
    });
  });
  group_.stream->wait(exchange.record());
  group_.device->copy_from_host(*group_.stream, call->to, pending->buffer.data(), call->bytes());
  Issued issued;
  issued.done = group_.stream->record();
  pending->taken->set(issued.done);
  return issued;
}

}  // namespace tranche::comm
