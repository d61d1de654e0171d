#include "comm/transport/thread_transport.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

namespace tranche::comm {

namespace {

class ThreadMessage : public Message {
 public:
  ThreadMessage(ThreadChannel& channel, std::shared_ptr<ThreadPost> post, bool sending)
      : channel_(channel), post_(std::move(post)), sending_(sending) {}
  ~ThreadMessage() override {
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
  ThreadChannel& channel_;
  std::shared_ptr<ThreadPost> post_;
  bool sending_;
};

class ThreadTransport : public Transport {
 public:
  ThreadTransport(std::shared_ptr<ThreadHub> hub, int rank, CommunicationThread& thread)
      : hub_(std::move(hub)), rank_(rank) {
    hub_->wakers[static_cast<std::size_t>(rank_)].set(&thread);
  }
  ~ThreadTransport() override { hub_->wakers[static_cast<std::size_t>(rank_)].set(nullptr); }

  int rank() const override { return rank_; }
  int size() const override { return hub_->size; }
  std::string_view backend() const override { return "threads"; }
  int node_of(int) const override { return 0; }
  bool needs_polling() const override { return false; }
  void close(bool clean, double) noexcept override {
    if (!clean || !farewell()) return;
    std::optional<FailureReport> report;
    {
      const std::lock_guard lock(hub_->mutex);
      const auto self = static_cast<std::size_t>(rank_);
      hub_->farewells[self] = farewell();
      for (const CallSignature& theirs : hub_->signatures[self]) {
        if (!report) report = farewell()(theirs);
      }
    }
    if (report) hub_->post_failure(*report);
  }

  bool reads(int) const override { return true; }
  std::optional<MemoryRegistration> register_memory(const void* data, std::int64_t bytes) override {
    return MemoryRegistration{hub_->register_memory(data), bytes, 0};
  }
  void deregister_memory(const MemoryRegistration& registration) noexcept override {
    hub_->deregister_memory(registration.allocation);
  }
  const void* map_peer(int, const MemoryRegistration& registration) override {
    const unsigned char* data = hub_->map_peer(registration.allocation);
    return data == nullptr ? nullptr : data + registration.offset;
  }
  void unmap_peer(int, const MemoryRegistration& registration) noexcept override {
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
  void send_signature(const CallSignature& signature, int peer) override {
    std::optional<FailureReport> ended;
    {
      const std::lock_guard lock(hub_->mutex);
      hub_->signatures[static_cast<std::size_t>(peer)].push_back(signature);
      const Farewell& farewell = hub_->farewells[static_cast<std::size_t>(peer)];
      if (farewell) ended = farewell(signature);
    }
    if (ended) hub_->post_failure(*ended);
    hub_->wakers[static_cast<std::size_t>(peer)].wake();
  }
  bool poll_signature(CallSignature& signature) override {
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
  std::unique_ptr<Message> post(ThreadChannel& channel, void* data, std::int64_t bytes, const Tag& tag,
                                bool sending) {
    auto mine = std::make_shared<ThreadPost>();
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
        const std::shared_ptr<ThreadPost> other = *found;
        others.erase(found);
        deliver(sending ? *mine : *other, sending ? *other : *mine);
        partner = other->owner;
        other->matched.store(true, std::memory_order_release);
        mine->matched.store(true, std::memory_order_release);
      }
    }
    if (partner >= 0) hub_->wakers[static_cast<std::size_t>(partner)].wake();
    return std::make_unique<ThreadMessage>(channel, std::move(mine), sending);
  }

  void deliver(ThreadPost& from, ThreadPost& to) const {
    if (from.bytes != to.bytes) {
      from.error = to.error =
          fmt::format("{} sent {} bytes where {} expects {}: the ranks' calls differ",
                      rank_names().of(from.owner), from.bytes, rank_names().of(to.owner), to.bytes);
    } else if (from.bytes > 0) {
      std::memcpy(to.data, from.data, static_cast<std::size_t>(from.bytes));
    }
  }

  std::shared_ptr<ThreadHub> hub_;
  int rank_;
};

}  // namespace

std::unique_ptr<Transport> make_thread_transport(std::shared_ptr<ThreadHub> hub, int rank,
                                                 CommunicationThread& thread) {
  return std::make_unique<ThreadTransport>(std::move(hub), rank, thread);
}

}  // namespace tranche::comm
