/// Collectives among thread ranks, and of a single rank.
#include <gtest/gtest.h>

#include "tests/comm/collective_suite.h"
#include "tests/core/rounds.h"
#include "tranche/comm/backends.h"

namespace tranche {
namespace {

constexpr std::int64_t small_staging = 64 << 10;

CommunicatorOptions options() {
  CommunicatorOptions result;
  result.timeout_seconds = 60;
  result.staging_bytes = small_staging;
  return result;
}

class ThreadRanks : public testing::TestWithParam<int> {};

TEST_P(ThreadRanks, EveryCollectiveMatchesBruteForce) {
  run_thread_ranks(GetParam(), [](int, const CommunicatorFactory& factory) {
    const auto comm = factory(options());
    test::check_everything(*comm, small_staging);
  });
}

/// All ways in which the ranks of a node exchange data. They run the same suite, so they have the same bits.
struct Way {
  const char* name;
  NodeCollectives collectives;
  bool copy_in;
};
constexpr Way ways[] = {{"messages", NodeCollectives::messages, false},
                        {"in place", NodeCollectives::shared, false},
                        {"copied in", NodeCollectives::shared, true}};

TEST_P(ThreadRanks, EveryWayMatchesBruteForce) {
  int point = GetParam();
  for (const Way& way : ways) {
    if (!test::swept(point++, 3)) continue;
    SCOPED_TRACE(way.name);
    FaultInjection faults;
    faults.copy_in = way.copy_in;
    run_thread_ranks(
        GetParam(),
        [&](int, const CommunicatorFactory& factory) {
          CommunicatorOptions chosen = options();
          chosen.collectives = way.collectives;
          const auto comm = factory(chosen);
          test::check_everything(*comm, small_staging);
        },
        faults);
  }
}

TEST(ThreadRanksInAWindow, AChunkTakesSeveralTurns) {
  for (const bool copy_in : {false, true}) {
    run_thread_ranks(
        2,
        [](int rank, const CommunicatorFactory& factory) {
          // Chunks of the default staging buffer are larger than quantum_bytes.
          CommunicatorOptions chosen;
          chosen.collectives = NodeCollectives::shared;
          const auto comm = factory(chosen);
          constexpr std::int64_t count = 1200007;
          std::vector<float> full(2 * count), sums(count);
          for (std::int64_t i = 0; i < 2 * count; ++i)
            full[static_cast<std::size_t>(i)] = static_cast<float>(i + rank);
          comm->reduce_scatter(full.data(), DataType::float32, sums.data(), DataType::float32, count, {}, {},
                               {})
              .wait();
          for (std::int64_t i = 0; i < count; ++i) {
            ASSERT_EQ(sums[static_cast<std::size_t>(i)], static_cast<float>(2 * (rank * count + i) + 1)) << i;
          }
          // The all_gather copies a part of one rank's data, then a part of the other's, and so on. The last
          // part is shorter.
          std::fill(full.begin(), full.end(), -1.0f);
          comm->all_gather(sums.data(), full.data(), count, DataType::float32, 0, {}, {}).wait();
          for (std::int64_t i = 0; i < 2 * count; ++i) {
            ASSERT_EQ(full[static_cast<std::size_t>(i)], static_cast<float>(2 * i + 1)) << i;
          }
        },
        {0, 0, copy_in});
  }
}

/// Declared nodes with `ranks_per_node` ranks; the last may have fewer.
void check_nodes(int size, int ranks_per_node, bool copy_in, double delay, int operations) {
  FaultInjection faults{delay, 11, copy_in};
  run_thread_ranks(
      size,
      [&](int, const CommunicatorFactory& factory) {
        CommunicatorOptions chosen = options();
        chosen.local_size = ranks_per_node;
        chosen.collectives = NodeCollectives::shared;
        const auto comm = factory(chosen);
        EXPECT_EQ(comm->local_size(),
                  std::min(ranks_per_node, size - comm->rank() / ranks_per_node * ranks_per_node));
        test::check_all_gather(*comm);
        test::check_reduce_scatter(*comm, small_staging);
        test::check_all_reduce(*comm, small_staging);
        test::check_split(*comm);
        test::check_many_in_flight(*comm, operations);
        test::check_late_ready(*comm);
        test::check_hash(*comm);
      },
      faults);
}

TEST_P(ThreadRanks, EveryNodeLayoutGivesTheSameBits) {
  int point = 0;
  for (int ranks_per_node = 2; ranks_per_node < GetParam(); ++ranks_per_node) {
    for (const bool copy_in : {false, true}) {
      if (!test::swept(point++, 3)) continue;
      SCOPED_TRACE(testing::Message() << ranks_per_node << " ranks a node, copied in: " << copy_in);
      check_nodes(GetParam(), ranks_per_node, copy_in, 0, 12);
    }
  }
}

TEST_P(ThreadRanks, DelaysChangeNoBitAcrossNodes) {
  if (GetParam() < 3) return;
  run_thread_ranks(GetParam(),
                   [](int, const CommunicatorFactory& factory) {
                     CommunicatorOptions chosen = options();
                     chosen.local_size = 2;
                     chosen.collectives = NodeCollectives::shared;
                     chosen.staging_bytes = 1024 * (GetParam() - 1);  // room for one slot only
                     const auto comm = factory(chosen);
                     test::check_many_in_flight(*comm, 20);
                     test::check_split(*comm);
                   },
                   {0.003, 9});
}

TEST_P(ThreadRanks, DelaysChangeNoBitInAWindow) {
  for (const bool copy_in : {false, true}) {
    SCOPED_TRACE(copy_in);
    run_thread_ranks(GetParam(),
                     [](int, const CommunicatorFactory& factory) {
                       CommunicatorOptions chosen = options();
                       chosen.collectives = NodeCollectives::shared;
                       // There is one slot, which reductions, gathers and all-reduces use in turn.
                       chosen.staging_bytes = std::max<std::int64_t>(1024 * (GetParam() - 1), 1);
                       const auto comm = factory(chosen);
                       test::check_many_in_flight(*comm, 25);
                       test::check_split(*comm);
                     },
                     {0.004, 5, copy_in});
  }
}

TEST_P(ThreadRanks, DelaysChangeNoBit) {
  for (const int round : test::rounds(3)) {
    const std::uint64_t seed = static_cast<std::uint64_t>(round) + 1;
    SCOPED_TRACE(seed);
    run_thread_ranks(GetParam(),
                     [](int, const CommunicatorFactory& factory) {
                       const auto comm = factory(options());
                       test::check_many_in_flight(*comm, 25);
                       test::check_split(*comm);
                     },
                     {0.004, seed});
  }
}

TEST_P(ThreadRanks, OneSlotIsEnough) {
  // The smallest staging buffer has one slot, which only the oldest reduction may use.
  run_thread_ranks(GetParam(),
                   [](int, const CommunicatorFactory& factory) {
                     CommunicatorOptions least = options();
                     least.staging_bytes = 1024 * (GetParam() - 1);
                     const auto comm = factory(least);
                     test::check_many_in_flight(*comm, 20);
                   },
                   {0.002, 7});
}

#ifdef __SANITIZE_THREAD__
constexpr int most_ranks = 4;  // the instrumented brute-force computation for six ranks takes most of a
                               // minute
#else
// Under AddressSanitizer there are larger groups: those of seven and eight below.
constexpr int most_ranks = test::sanitized ? 4 : 6;

TEST(ManyThreadRanks, EveryNodeLayoutGivesTheSameBits) {
  int point = 0;  // one layout at a time where sanitized
  for (const auto& [size, ranks_per_node] : {std::pair{7, 3}, std::pair{8, 4}, std::pair{8, 2}}) {
    if (test::sanitized && !test::swept(point++, 3)) continue;
    SCOPED_TRACE(testing::Message() << size << " ranks, " << ranks_per_node << " a node");
    run_thread_ranks(size, [each = ranks_per_node](int, const CommunicatorFactory& factory) {
      CommunicatorOptions chosen = options();
      chosen.local_size = each;
      chosen.collectives = NodeCollectives::shared;
      const auto comm = factory(chosen);
      test::check_all_gather(*comm);
      test::check_reduce_scatter(*comm, small_staging);
      test::check_many_in_flight(*comm, 10);
    });
  }
}

// Far more ranks than cores: only the exchanges, in every way.
TEST(ManyThreadRanks, EveryWayMatchesBruteForce) {
  int point = 0;
  for (const int size : {7, 8}) {
    for (const Way& way : ways) {
      if (!test::swept(point++, 5)) continue;
      SCOPED_TRACE(testing::Message() << size << " ranks, " << way.name);
      FaultInjection faults;
      faults.copy_in = way.copy_in;
      run_thread_ranks(
          size,
          [&](int, const CommunicatorFactory& factory) {
            CommunicatorOptions chosen = options();
            chosen.collectives = way.collectives;
            const auto comm = factory(chosen);
            test::check_all_gather(*comm);
            test::check_reduce_scatter(*comm, small_staging);
            test::check_all_reduce(*comm, small_staging);
            test::check_many_in_flight(*comm, 10);
          },
          faults);
    }
  }
}
#endif
INSTANTIATE_TEST_SUITE_P(Sizes, ThreadRanks, testing::Range(1, most_ranks + 1));

TEST(SelfCommunicator, EveryCollectiveMatchesBruteForce) {
  const auto comm = make_self_communicator(options());
  EXPECT_EQ(comm->backend(), "self");
  EXPECT_EQ(comm->size(), 1);
  test::check_everything(*comm, small_staging);
  EXPECT_EQ(comm->meter().total(Traffic::data).bytes, 0);
}

}  // namespace
}  // namespace tranche
