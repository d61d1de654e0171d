/// Exchanges data between threads of one process that can read each other's device memory. A call meets its
/// peers on the host twice while it is issued. At the first meeting each rank posts its buffers and the event
/// after which they may be read; at the second, the event after which it has read the peers' buffers. The
/// enqueued kernels read the peers' memory directly, without a buffer in between.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>

#include "comm/call_signature.h"
#include "comm/deterministic_sum.h"
#include "comm/device/device_exchange.h"
#include "comm/transport/operation.h"
#include "core/clock.h"
#include "tranche/core/error.h"

namespace tranche::comm {

namespace {

/// A rank's message to its peers: its call, and the point after which they may read its data, or after which
/// it has read theirs.
struct Post {
  std::shared_ptr<const DeviceCall> call;
  Event event;
};

/// A send that waits for its recv.
struct Offer {
  Post post;
  std::shared_ptr<HostEvent> taken;
};

/// The meeting point of a group's ranks. Two sets of posts alternate: a rank that posts for the meeting after
/// the next has already left this one.
struct Meeting {
  explicit Meeting(int size) : posts{std::vector<Post>(size), std::vector<Post>(size)}, arrived(size) {}
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Post> posts[2];
  std::vector<std::uint64_t> arrived;  ///< the number of meetings of each rank
  std::map<std::pair<int, int>, std::deque<Offer>> offers;
};

class SharedExchange : public DeviceExchange {
 public:
  explicit SharedExchange(const DeviceGroup& group) : group_(group) {
    // The ranks share an address space, so rank 0 sends an address. The barrier keeps rank 0's pointer alive
    // until all have copied it.
    const OperationLabel label{"", "start", Traffic::control, Tier::host};
    if (group.rank() == 0) meeting_ = std::make_shared<Meeting>(group.size());
    auto address = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(&meeting_));
    group.host->broadcast(&address, 1, DataType::int64, 0, {}, label).wait();
    if (group.rank() != 0) {
      meeting_ = *reinterpret_cast<const std::shared_ptr<Meeting>*>(static_cast<std::intptr_t>(address));
    }
    group.host->barrier(label).wait();
  }

  Issued issue(const std::shared_ptr<const DeviceCall>& call, const Event& started) override {
    if (group_.line) return DeviceExchange::issue(call, started);
    Stream& stream = *group_.stream;
    Issued issued;
    const std::vector<Post> posts = meet({call, started});
    for (const int peer : group_.peers()) wait_for(stream, *call, peer, posts[peer].event, issued);
    enqueue(*call, posts);
    const std::vector<Post> read = meet({call, stream.record()});
    for (const int peer : group_.peers()) wait_for(stream, *call, peer, read[peer].event, issued);
    issued.done = stream.record();
    return issued;
  }

  Issued message(const std::shared_ptr<const DeviceCall>& call, const Event& started,
                 Stream& channel) override {
    return call->name == "send" ? send(call, started) : receive(*call, channel);
  }

 private:
  void enqueue(const DeviceCall& call, const std::vector<Post>& posts) {
    Stream& stream = *group_.stream;
    const int rank = group_.rank(), size = group_.size();
    if (call.count == 0 && call.sends.empty()) return;
    const StreamSpan span(stream, call.what());
    if (call.name == "reduce_scatter") {
      std::vector<const void*> pieces;
      for (int giver = 0; giver < std::min(call.sum.givers, size); ++giver) {
        pieces.push_back(posts[static_cast<std::size_t>(giver)].call->from_bytes() + rank * call.bytes());
      }
      deterministic_sum(stream, pieces, call.dtype, call.sum,
                        TensorView{call.to, call.output_dtype, Shape{call.count}});
    } else if (call.name == "broadcast") {
      if (rank != call.other) {
        copy_on_device(stream, call.to, posts[call.other].call->from, call.count, call.dtype);
      }
    } else {
      const bool gather = call.name == "all_gather";
      for (int step = 0; step < size; ++step) {
        const int peer = (rank + step) % size;
        const DeviceCall& of_peer = *posts[peer].call;
        if (gather) {
          copy_on_device(stream, call.to_bytes() + peer * call.bytes(), of_peer.from, call.count, call.dtype);
        } else {
          copy_on_device(stream, call.place_received_from(peer), of_peer.place_sent_to(rank),
                         call.received_from(peer).count, call.dtype);
        }
      }
    }
  }

  /// Makes the stream continue after a point of a peer.
  void wait_for(Stream& stream, const DeviceCall& call, int peer, const Event& event, Issued& issued) {
    const int job_rank = group_.job_rank(peer);
    stream.wait(Event(std::make_shared<GuardedEvent>(event, group_.failure, call.what(), job_rank)));
    issued.peers.emplace_back(job_rank, event);
  }

  /// Sleeps until `come` returns true. Throws when the group fails or the time-out has passed.
  template <typename Come, typename Absent>
  void wait_until(std::unique_lock<std::mutex>& lock, const DeviceCall& call, Come&& come, Absent&& absent) {
    const double begin = detail::seconds_now(), limit = begin + group_.timeout_seconds;
    bool asked = false;
    constexpr std::chrono::milliseconds slice{20};
    while (!meeting_->changed.wait_for(lock, slice, come)) {
      lock.unlock();
      if (!asked && call.ask && detail::seconds_now() - begin > patience_of(group_.timeout_seconds)) {
        asked = true;
        call.ask();
      }
      group_.failure->check(call.what());
      try {
        group_.host->check_health();
      } catch (...) {
        group_.failure->fail({}, std::current_exception());
        group_.failure->check(call.what());
      }
      lock.lock();
      if (detail::seconds_now() < limit) continue;
      PendingPeers pending;
      for (const int peer : absent()) pending.ranks.push_back(group_.job_rank(peer));
      if (!pending.ranks.empty()) {
        throw CommunicationError(
            timeout_message(call.what(), pending, group_.timeout_seconds, group_.failure->rank_names()));
      }
    }
  }

  std::vector<Post> meet(Post mine) {
    const int rank = group_.rank(), size = group_.size();
    if (size == 1) return {std::move(mine)};
    const std::shared_ptr<const DeviceCall> call = mine.call;
    Meeting& meeting = *meeting_;
    const std::uint64_t number = ++meetings_;
    std::vector<Post>& posts = meeting.posts[number % 2];
    std::unique_lock lock(meeting.mutex);
    posts[static_cast<std::size_t>(rank)] = std::move(mine);
    meeting.arrived[static_cast<std::size_t>(rank)] = number;
    meeting.changed.notify_all();
    const auto absent = [&] {
      std::vector<int> ranks;
      for (const int peer : group_.peers()) {
        if (meeting.arrived[static_cast<std::size_t>(peer)] < number) ranks.push_back(peer);
      }
      return ranks;
    };
    wait_until(
        lock, *call, [&] { return absent().empty(); }, absent);
    const std::vector<Post> result = posts;
    lock.unlock();
    for (const int peer : group_.peers()) require_same(*call, peer, *result[peer].call);
    // All pairs are checked, so that no rank reads memory of a rank that has thrown.
    for (int sender = 0; sender < size; ++sender) {
      for (int receiver = 0; receiver < size; ++receiver) {
        if (receiver == sender) continue;
        require_equal_bytes(group_, *call, sender, result[sender].call->bytes_to(receiver), receiver,
                            result[receiver].call->bytes_from(sender));
      }
    }
    return result;
  }

  void require_same(const DeviceCall& call, int peer, const DeviceCall& of_peer) const {
    if (of_peer.name == call.name && of_peer.unit == call.unit) return;
    const int here = group_.job_rank(group_.rank());
    const int there = group_.job_rank(peer);
    // Each call has two meetings.
    const Tag tag{0, false, (meetings_ - 1) / 2, 0};
    throw CommunicationError(call.what() + ": " +
                             difference(make_call_signature(here, tag, 0, call.name, call.unit),
                                        make_call_signature(there, tag, 0, of_peer.name, of_peer.unit),
                                        group_.failure->rank_names()));
  }

  Issued send(const std::shared_ptr<const DeviceCall>& call, const Event& started) {
    Offer offer{{call, started}, std::make_shared<HostEvent>()};
    Issued issued{Event(offer.taken), {{group_.job_rank(call->other), Event(offer.taken)}}, true};
    const std::lock_guard lock(meeting_->mutex);
    meeting_->offers[{group_.rank(), call->other}].push_back(std::move(offer));
    meeting_->changed.notify_all();
    return issued;
  }

  Issued receive(const DeviceCall& call, Stream& channel) {
    std::unique_lock lock(meeting_->mutex);
    std::deque<Offer>& offers = meeting_->offers[{call.other, group_.rank()}];
    wait_until(
        lock, call, [&] { return !offers.empty(); }, [&] { return std::vector<int>{call.other}; });
    const Offer offer = std::move(offers.front());
    offers.pop_front();
    lock.unlock();
    require_equal_bytes(group_, call, call.other, offer.post.call->bytes(), group_.rank(), call.bytes());
    Issued issued;
    wait_for(channel, call, call.other, offer.post.event, issued);
    {
      const StreamSpan span(channel, call.what());
      copy_on_device(channel, call.to, offer.post.call->from, call.count, call.dtype);
    }
    issued.done = channel.record();
    channel.enqueue("recv", [taken = offer.taken] { taken->complete(); });
    return issued;
  }

  DeviceGroup group_;
  std::shared_ptr<Meeting> meeting_;
  std::uint64_t meetings_ = 0;
};

}  // namespace

std::unique_ptr<DeviceExchange> make_shared_exchange(const DeviceGroup& group) {
  return std::make_unique<SharedExchange>(group);
}

}  // namespace tranche::comm
