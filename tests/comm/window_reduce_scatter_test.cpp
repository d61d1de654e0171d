// Reduce-scatters whose ranks are advanced one by one.
#include "comm/node/window_reduce_scatter.h"

#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "comm/node/staging_buffer.h"

namespace tranche::comm {
namespace {

/// The state that the ranks of one test share.
struct Node {
  std::map<std::pair<int, int>, std::deque<std::vector<unsigned char>>> sent;  ///< by sender and receiver
};

class HandMovedTransport : public Transport {
 public:
  HandMovedTransport(Node& node, int rank, int size) : node_(node), rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string_view backend() const override { return "by hand"; }
  int node_of(int) const override { return 0; }
  bool reads(int) const override { return true; }
  std::optional<MemoryRegistration> register_memory(const void* data, std::int64_t bytes) override {
    return MemoryRegistration{static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(data)), bytes, 0};
  }
  const void* map_peer(int, const MemoryRegistration& registration) override {
    return reinterpret_cast<const unsigned char*>(static_cast<std::intptr_t>(registration.allocation)) +
           registration.offset;
  }
  std::unique_ptr<Message> send(const void* data, std::int64_t bytes, int peer, const Tag&) override {
    const auto* first = static_cast<const unsigned char*>(data);
    node_.sent[{rank_, peer}].emplace_back(first, first + bytes);
    struct Sent : Message {
      bool test() override { return true; }
    };
    return std::make_unique<Sent>();
  }
  std::unique_ptr<Message> receive(void* data, std::int64_t, int peer, const Tag&) override {
    struct Received : Message {
      std::deque<std::vector<unsigned char>>* from = nullptr;
      unsigned char* to = nullptr;
      bool test() override {
        if (from->empty()) return false;
        std::copy(from->front().begin(), from->front().end(), to);
        from->pop_front();
        return true;
      }
    };
    auto received = std::make_unique<Received>();
    received->from = &node_.sent[{peer, rank_}];
    received->to = static_cast<unsigned char*>(data);
    return received;
  }
  std::optional<FailureReport> poll_failure() override { return std::nullopt; }
  bool post_failure(const FailureReport&) override { return true; }
  bool needs_polling() const override { return false; }
  void abort_job(int) noexcept override {}
  void close(bool, double) noexcept override {}

 private:
  Node& node_;
  int rank_, size_;
};

/// One rank of a reduce-scatter of `count` floats per rank. Element i on rank r has the value 1000 r + i mod
/// 997.
struct Rank {
  Rank(Node& node, int rank, int size, std::int64_t count)
      : transport(node, rank, size),
        full(static_cast<std::size_t>(size * count)),
        sum(static_cast<std::size_t>(count), -1.0f),
        staging(nullptr, 1 << 20, size) {
    for (std::size_t i = 0; i < full.size(); ++i) {
      full[i] = static_cast<float>(1000 * rank + static_cast<int>(i % 997));
    }
    WindowCall call;
    for (int member = 0; member < size; ++member) call.members.push_back(member);
    call.self = rank;
    call.mine = full.data();
    call.mine_bytes = static_cast<std::int64_t>(full.size()) * 4;
    call.count = count;
    call.chunk = 100000;
    call.transport = &transport;
    call.registration = transport.register_memory(full.data(), call.mine_bytes);
    const WindowReduceScatter::Output output{sum.data(), 4};
    OperationInfo info;
    info.name = "reduce_scatter";
    info.done = std::make_shared<HostEvent>();
    operation = std::make_unique<WindowReduceScatter>(
        std::move(info), std::move(call), output, size,
        [this](std::span<const void* const> pieces, void* out, std::int64_t elements) {
          for (std::int64_t i = 0; i < elements; ++i) {
            float value = 0;
            for (const void* piece : pieces) value += static_cast<const float*>(piece)[i];
            static_cast<float*>(out)[i] = value;
          }
          summed += elements;
        });
  }
  void advance() { operation->advance(transport, staging); }

  HandMovedTransport transport;
  std::vector<float> full, sum;
  StagingBuffer staging;
  std::int64_t summed = 0;  ///< elements
  std::unique_ptr<WindowReduceScatter> operation;
};

std::deque<Rank> ranks_of(Node& node, int size, std::int64_t count) {
  std::deque<Rank> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.emplace_back(node, rank, size, count);
  return ranks;
}

void expect_sums(const Rank& rank, int number, int size) {
  const auto count = static_cast<std::int64_t>(rank.sum.size());
  for (std::int64_t i = 0; i < count; ++i) {
    const auto own = static_cast<float>((number * count + i) % 997);
    ASSERT_EQ(rank.sum[static_cast<std::size_t>(i)],
              static_cast<float>(500 * size * (size - 1)) + static_cast<float>(size) * own)
        << "rank " << number << ", element " << i;
  }
}

TEST(WindowReduceScatter, ReadsAndSumsWithoutItsPeers) {
  constexpr int size = 3;
  constexpr std::int64_t count = 300007;  // four chunks, the last one short
  Node node;
  auto ranks = ranks_of(node, size, count);
  // All ranks send their addresses; then the others are not advanced.
  for (Rank& rank : ranks) rank.advance();
  for (int round = 0; round < 100; ++round) ranks[1].advance();
  EXPECT_EQ(ranks[1].summed, count);
  expect_sums(ranks[1], 1, size);
  EXPECT_FALSE(ranks[1].operation->finished()) << "its memory may still be read";
  for (int round = 0; round < 20; ++round) {
    for (Rank& rank : ranks) rank.advance();
  }
  for (int number = 0; number < size; ++number) {
    Rank& rank = ranks[static_cast<std::size_t>(number)];
    EXPECT_TRUE(rank.operation->finished());
    EXPECT_EQ(rank.summed, count);
    expect_sums(rank, number, size);
    rank.operation->abandon(rank.staging);
  }
}

}  // namespace
}  // namespace tranche::comm
