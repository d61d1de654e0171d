// Reduce-scatters whose ranks are moved by hand: who has ended its own part does that of the others.
#include "comm/node/window_reduce.h"

#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "comm/node/slab.h"

namespace tranche::comm {
namespace {

/// The state that the ranks of one test share.
struct Host {
  std::map<std::pair<int, int>, std::deque<std::vector<unsigned char>>> sent;  ///< by sender and receiver
  std::deque<WorkShare> shares;
  int open = 0;
  bool has_shares = true;
};

class HandMovedTransport : public Transport {
 public:
  HandMovedTransport(Host& host, int rank, int size) : host_(host), rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string_view backend() const override { return "by hand"; }
  int host_of(int) const override { return 0; }
  bool reads(int) const override { return true; }
  std::optional<Exposure> expose(const void* data, std::int64_t bytes) override {
    return Exposure{static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(data)), bytes, 0};
  }
  const void* look_at(int peer, const Exposure& exposure) override { return reach(peer, exposure); }
  void* reach(int, const Exposure& exposure) override {
    return reinterpret_cast<unsigned char*>(static_cast<std::intptr_t>(exposure.piece)) + exposure.offset;
  }
  int open_share() override {
    if (!host_.has_shares) return -1;
    host_.shares.emplace_back();
    ++host_.open;
    return static_cast<int>(host_.shares.size()) - 1;
  }
  void close_share(int) noexcept override { --host_.open; }
  WorkShare* share(int, int number) override { return &host_.shares[static_cast<std::size_t>(number)]; }
  std::unique_ptr<Message> send(const void* data, std::int64_t bytes, int peer, const Tag&) override {
    const auto* first = static_cast<const unsigned char*>(data);
    host_.sent[{rank_, peer}].emplace_back(first, first + bytes);
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
    received->from = &host_.sent[{peer, rank_}];
    received->to = static_cast<unsigned char*>(data);
    return received;
  }
  std::optional<FailureReport> poll_failure() override { return std::nullopt; }
  bool post_failure(const FailureReport&) override { return true; }
  bool needs_polling() const override { return false; }
  void abort_job(int) noexcept override {}
  void close(bool, double) noexcept override {}

 private:
  Host& host_;
  int rank_, size_;
};

/// One rank of a reduce-scatter of `count` floats a rank: element i of what rank r has is 1000 r + i mod 997.
struct Rank {
  Rank(Host& host, int rank, int size, std::int64_t count, std::int64_t form = 1)
      : transport(host, rank, size),
        full(static_cast<std::size_t>(size * count)),
        sum(static_cast<std::size_t>(count), -1.0f),
        slab(nullptr, 1 << 20, size) {
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
    call.exposure = transport.expose(full.data(), call.mine_bytes);
    const WindowReduce::Output output{sum.data(), 4};
    WindowReduce::offer(call, output, form);
    OperationInfo info;
    info.name = "reduce_scatter";
    info.done = std::make_shared<HostEvent>();
    operation = std::make_unique<WindowReduce>(
        std::move(info), std::move(call), output,
        [this](std::span<const void* const> pieces, void* out, std::int64_t elements) {
          for (std::int64_t i = 0; i < elements; ++i) {
            float value = 0;
            for (const void* piece : pieces) value += static_cast<const float*>(piece)[i];
            static_cast<float*>(out)[i] = value;
          }
          summed += elements;
        });
  }
  void advance() { operation->advance(transport, slab); }

  HandMovedTransport transport;
  std::vector<float> full, sum;
  Slab slab;
  std::int64_t summed = 0;  ///< elements, of anybody's result
  std::unique_ptr<WindowReduce> operation;
};

std::deque<Rank> ranks_of(Host& host, int size, std::int64_t count) {
  std::deque<Rank> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.emplace_back(host, rank, size, count);
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

TEST(WindowReduce, WhoHasEndedDoesThePartsOfThoseThatAreLate) {
  constexpr int size = 3;
  constexpr std::int64_t count = 400009;  // five blocks, the last one short
  Host host;
  auto ranks = ranks_of(host, size, count);
  // All tell where their memory lies; then the last two are not let run.
  for (Rank& rank : ranks) rank.advance();
  for (int turn = 0; turn < 100; ++turn) ranks[0].advance();
  EXPECT_FALSE(ranks[0].operation->finished()) << "its memory may still be read";
  for (int number = 0; number < size; ++number)
    expect_sums(ranks[static_cast<std::size_t>(number)], number, size);
  std::int64_t summed = 0;
  for (const Rank& rank : ranks) summed += rank.summed;
  EXPECT_EQ(summed, size * count) << "every element once";
  EXPECT_GE(ranks[0].summed, 2 * count);
  for (int turn = 0; turn < 20; ++turn) {
    for (Rank& rank : ranks) rank.advance();
  }
  for (Rank& rank : ranks) {
    EXPECT_TRUE(rank.operation->finished());
    rank.operation->abandon(rank.slab);
  }
  EXPECT_EQ(host.open, 0) << "shares are given back";
}

TEST(WindowReduce, WithoutSharesEachDoesItsOwn) {
  constexpr int size = 3;
  constexpr std::int64_t count = 300007;
  Host host;
  host.has_shares = false;
  auto ranks = ranks_of(host, size, count);
  for (Rank& rank : ranks) rank.advance();
  for (int turn = 0; turn < 100; ++turn) ranks[1].advance();
  EXPECT_EQ(ranks[1].summed, count);
  for (int turn = 0; turn < 20; ++turn) {
    for (Rank& rank : ranks) rank.advance();
  }
  for (int number = 0; number < size; ++number) {
    Rank& rank = ranks[static_cast<std::size_t>(number)];
    EXPECT_TRUE(rank.operation->finished());
    EXPECT_EQ(rank.summed, count);
    expect_sums(rank, number, size);
    rank.operation->abandon(rank.slab);
  }
}

TEST(WindowReduce, NobodyHelpsWhoSumsInAnotherWay) {
  constexpr std::int64_t count = 300007;
  Host host;
  std::deque<Rank> ranks;
  ranks.emplace_back(host, 0, 2, count, 1);
  ranks.emplace_back(host, 1, 2, count, 2);
  for (Rank& rank : ranks) rank.advance();
  for (int turn = 0; turn < 100; ++turn) ranks[0].advance();
  EXPECT_EQ(ranks[0].summed, count);
  for (int turn = 0; turn < 20; ++turn) ranks[1].advance();
  EXPECT_EQ(ranks[1].summed, count);
  for (Rank& rank : ranks) rank.operation->abandon(rank.slab);
}

TEST(WindowReduce, OfARankThatFailedNothingIsClaimedAnyMore) {
  constexpr int size = 2;
  constexpr std::int64_t count = 400009;
  Host host;
  auto ranks = ranks_of(host, size, count);
  ranks[1].advance();
  ranks[0].advance();
  // Rank 1 gives up before its peer has come to its blocks.
  const std::int64_t before = ranks[1].summed;
  ranks[1].operation->abandon(ranks[1].slab);
  for (int turn = 0; turn < 100; ++turn) ranks[0].advance();
  EXPECT_EQ(ranks[0].summed, count) << "its own part, and nothing of rank 1's";
  expect_sums(ranks[0], 0, size);
  EXPECT_EQ(ranks[1].summed, before);
  EXPECT_FALSE(ranks[0].operation->finished());
  ranks[0].operation->abandon(ranks[0].slab);
  EXPECT_EQ(host.open, 2) << "a number that a peer may still ask for is not used again";
}

TEST(WindowReduce, WhatWasNeverSubmittedGivesItsShareBack) {
  Host host;
  { const Rank rank(host, 0, 2, 300007); }
  EXPECT_EQ(host.shares.size(), 1U);
  EXPECT_EQ(host.open, 0);
}

}  // namespace
}  // namespace tranche::comm
