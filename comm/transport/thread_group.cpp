#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <thread>

#include <fmt/format.h>

#include "comm/call_signature.h"
#include "comm/group_communicator.h"
#include "tranche/comm/backends.h"

namespace tranche {

namespace {

using comm::FailureReport;
using comm::Message;
using comm::Tag;

/// One side of a message; shared between its owner and the channel it waits in.
struct Post {
  void* data = nullptr;
  std::int64_t bytes = 0;
  Tag tag;
  int owner = 0;
  std::string error;  // written before `matched`
  std::atomic<bool> matched{false};
};

/// Messages from one rank to another that wait for their other half. Whoever comes second copies, holding
/// the mutex: so an abandoned buffer is never touched after it was deregistered.
struct Channel {
  std::mutex mutex;
  std::list<std::shared_ptr<Post>> sends, receives;
};

/// How a rank's communication thread is woken.
struct Waker {
  std::mutex mutex;
  comm::CommunicationThread* thread = nullptr;
  void wake() {
    const std::lock_guard lock(mutex);
    if (thread != nullptr) thread->wake();
  }
  void set(comm::CommunicationThread* value) {
    const std::lock_guard lock(mutex);
    thread = value;
  }
};

}  // namespace

struct ThreadGroup::Hub {
  Hub(int ranks, const FaultInjection& injection)
      : size(ranks),
        faults(injection),
        channels(static_cast<std::size_t>(ranks) * static_cast<std::size_t>(ranks)),
        wakers(static_cast<std::size_t>(ranks)),
        signatures(static_cast<std::size_t>(ranks)),
        made(static_cast<std::size_t>(ranks)) {}

  Channel& channel(int from, int to) { return channels[static_cast<std::size_t>(from * size + to)]; }
  void post_failure(const FailureReport& report) {
    {
      const std::lock_guard lock(mutex);
      if (failure && !(failure->cause_follows && !report.cause_follows)) return;
      failure = report;
    }
    failed = true;
    for (Waker& waker : wakers) waker.wake();
  }

  /// Memory that its rank has registered.
  struct Registered {
    const unsigned char* data = nullptr;
    int readers = 0;
    bool deregistered = false;
  };
  std::int64_t register_memory(const void* data) {
    const std::lock_guard lock(registered_mutex);
    registered[++registrations].data = static_cast<const unsigned char*>(data);
    return registrations;
  }
  /// Waits for those that read just now; they never wait for anything themselves.
  void deregister_memory(std::int64_t number) {
    std::unique_lock lock(registered_mutex);
    const auto found = registered.find(number);
    if (found == registered.end()) return;
    found->second.deregistered = true;
    registered_changed.wait(lock, [&] { return found->second.readers == 0; });
    registered.erase(found);
  }
  const unsigned char* map_peer(std::int64_t number) {
    const std::lock_guard lock(registered_mutex);
    const auto found = registered.find(number);
    if (found == registered.end() || found->second.deregistered) return nullptr;
    ++found->second.readers;
    return found->second.data;
  }
  void unmap_peer(std::int64_t number) {
    const std::lock_guard lock(registered_mutex);
    --registered.at(number).readers;
    registered_changed.notify_all();
  }

  const int size;
  const FaultInjection faults;
  std::mutex registered_mutex;
  std::condition_variable registered_changed;
  std::int64_t registrations = 0;
  std::map<std::int64_t, Registered> registered;
  std::vector<Channel> channels;
  std::vector<Waker> wakers;
  std::vector<std::deque<comm::CallSignature>> signatures;  ///< by whom they are for; guarded by `mutex`
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::optional<FailureReport> failure;
  std::vector<bool> made;

  class Transport;
  class HalfMessage;
};

class ThreadGroup::Hub::HalfMessage : public Message {
 public:
  HalfMessage(Channel& channel, std::shared_ptr<Post> post, bool sending)
      : channel_(channel), post_(std::move(post)), sending_(sending) {}
  ~HalfMessage() override {
    if (post_->matched.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(channel_.mutex);
    (sending_ ? channel_.sends : channel_.receives).remove(post_);
  }
  bool test() override {
    if (!post_->matched.load(std::memory_order_acquire)) return false;
    if (!post_->error.empty()) throw CommunicationError(post_->error);
    return true;
  }

 private:
  Channel& channel_;
  std::shared_ptr<Post> post_;
  bool sending_;
};

class ThreadGroup::Hub::Transport : public comm::Transport {
 public:
  Transport(std::shared_ptr<Hub> hub, int rank, comm::CommunicationThread& thread)
      : hub_(std::move(hub)), rank_(rank) {
    hub_->wakers[static_cast<std::size_t>(rank_)].set(&thread);
  }
  ~Transport() override { hub_->wakers[static_cast<std::size_t>(rank_)].set(nullptr); }

  int rank() const override { return rank_; }
  int size() const override { return hub_->size; }
  std::string_view backend() const override { return "threads"; }
  int node_of(int) const override { return 0; }
  bool needs_polling() const override { return false; }
  void close(bool, double) noexcept override {}

  bool reads(int) const override { return true; }
  std::optional<comm::MemoryRegistration> register_memory(const void* data, std::int64_t bytes) override {
    return comm::MemoryRegistration{hub_->register_memory(data), bytes, 0};
  }
  void deregister_memory(const comm::MemoryRegistration& registration) noexcept override {
    hub_->deregister_memory(registration.allocation);
  }
  const void* map_peer(int, const comm::MemoryRegistration& registration) override {
    const unsigned char* data = hub_->map_peer(registration.allocation);
    return data == nullptr ? nullptr : data + registration.offset;
  }
  void unmap_peer(int, const comm::MemoryRegistration& registration) noexcept override {
    hub_->unmap_peer(registration.allocation);
  }

  std::unique_ptr<Message> send(const void* data, std::int64_t bytes, int peer, const Tag& tag) override {
    return post(hub_->channel(rank_, peer), const_cast<void*>(data), bytes, tag, true);
  }
  std::unique_ptr<Message> receive(void* data, std::int64_t bytes, int peer, const Tag& tag) override {
    return post(hub_->channel(peer, rank_), data, bytes, tag, false);
  }
  std::optional<FailureReport> poll_failure() override {
    if (!hub_->failed) return std::nullopt;
    const std::lock_guard lock(hub_->mutex);
    return hub_->failure;
  }
  bool post_failure(const FailureReport& report) override {
    hub_->post_failure(report);
    return true;
  }
  void send_signature(const comm::CallSignature& signature, int peer) override {
    {
      const std::lock_guard lock(hub_->mutex);
      hub_->signatures[static_cast<std::size_t>(peer)].push_back(signature);
    }
    hub_->wakers[static_cast<std::size_t>(peer)].wake();
  }
  bool poll_signature(comm::CallSignature& signature) override {
    const std::lock_guard lock(hub_->mutex);
    auto& mine = hub_->signatures[static_cast<std::size_t>(rank_)];
    if (mine.empty()) return false;
    signature = mine.front();
    mine.pop_front();
    return true;
  }
  void abort_job(int status) noexcept override {
    hub_->post_failure(
        {rank_, fmt::format("aborted with status {}", status), static_cast<ExitStatus>(status)});
  }

 private:
  std::unique_ptr<Message> post(Channel& channel, void* data, std::int64_t bytes, const Tag& tag,
                                bool sending) {
    auto mine = std::make_shared<Post>();
    mine->data = data;
    mine->bytes = bytes;
    mine->tag = tag;
    mine->owner = rank_;
    int partner = -1;
    {
      const std::lock_guard lock(channel.mutex);
      auto& others = sending ? channel.receives : channel.sends;
      const auto found =
          std::find_if(others.begin(), others.end(), [&](const auto& other) { return other->tag == tag; });
      if (found == others.end()) {
        (sending ? channel.sends : channel.receives).push_back(mine);
      } else {
        const std::shared_ptr<Post> other = *found;
        others.erase(found);
        deliver(sending ? *mine : *other, sending ? *other : *mine);
        partner = other->owner;
        other->matched.store(true, std::memory_order_release);
        mine->matched.store(true, std::memory_order_release);
      }
    }
    if (partner >= 0) hub_->wakers[static_cast<std::size_t>(partner)].wake();
    return std::make_unique<HalfMessage>(channel, std::move(mine), sending);
  }

  static void deliver(Post& from, Post& to) {
    if (from.bytes != to.bytes) {
      from.error = to.error =
          fmt::format("rank {} sent {} bytes where rank {} expects {}: the ranks' calls differ", from.owner,
                      from.bytes, to.owner, to.bytes);
    } else if (from.bytes > 0) {
      std::memcpy(to.data, from.data, static_cast<std::size_t>(from.bytes));
    }
  }

  std::shared_ptr<Hub> hub_;
  int rank_;
};

ThreadGroup::ThreadGroup(int size, const FaultInjection& faults) {
  if (size < 1) throw InvalidArgument(fmt::format("a group of {} thread ranks", size));
  hub_ = std::make_shared<Hub>(size, faults);
}

int ThreadGroup::size() const noexcept {
  return hub_->size;
}

std::unique_ptr<Communicator> ThreadGroup::communicator(int rank, const CommunicatorOptions& options) const {
  if (rank < 0 || rank >= hub_->size) {
    throw InvalidArgument(fmt::format("rank {} of a group of {} thread ranks", rank, hub_->size));
  }
  {
    const std::lock_guard lock(hub_->mutex);
    if (hub_->made[static_cast<std::size_t>(rank)]) {
      throw LogicError(fmt::format("the communicator of thread rank {} has been made already", rank));
    }
    hub_->made[static_cast<std::size_t>(rank)] = true;
  }
  auto thread = std::make_shared<comm::CommunicationThread>();
  auto transport = std::make_unique<Hub::Transport>(hub_, rank, *thread);
  return comm::GroupCommunicator::of_all(
      std::make_shared<comm::ProgressEngine>(std::move(transport), std::move(thread), options, hub_->faults));
}

void ThreadGroup::post_failure(int rank, std::string_view cause, ExitStatus status) const noexcept {
  try {
    hub_->post_failure({rank, std::string(cause), status});
  } catch (...) {
    // Out of memory while copying the cause: the time-outs end the peers.
  }
}

void run_thread_ranks(int size, const std::function<void(int rank, const CommunicatorFactory&)>& body,
                      const FaultInjection& faults) {
  const ThreadGroup group(size, faults);
  std::mutex mutex;
  std::exception_ptr first_cause, first_echo;
  const auto run = [&](int rank) {
    std::exception_ptr error;
    bool echo = false;
    try {
      body(rank, [&](const CommunicatorOptions& options) { return group.communicator(rank, options); });
      return;
    } catch (comm::PeerFailure&) {
      echo = true;
      error = std::current_exception();
    } catch (Error& known) {
      known.attach_rank(rank);
      error = std::current_exception();
    } catch (...) {
      error = std::current_exception();
    }
    {
      const std::lock_guard lock(mutex);
      std::exception_ptr& first = echo ? first_echo : first_cause;
      if (!first) first = error;
    }
    group.post_failure(rank, message_of(error), exit_status_of(error));
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
  if (first_cause) std::rethrow_exception(first_cause);
  if (first_echo) std::rethrow_exception(first_echo);
}

}  // namespace tranche
