/// Collectives over thread ranks and a single rank.
#include <gtest/gtest.h>

#include "tranche/comm/backends.h"
#include "tranche/tests/comm/collective_suite.h"

namespace tranche {
namespace {

constexpr std::int64_t slab = 64 << 10;

CommunicatorOptions options() {
  CommunicatorOptions result;
  result.timeout_seconds = 60;
  result.slab_bytes = slab;
  return result;
}

class ThreadRanks : public testing::TestWithParam<int> {};

TEST_P(ThreadRanks, EveryCollectiveMatchesBruteForce) {
  run_thread_ranks(GetParam(), [](int, const CommunicatorFactory& factory) {
    const auto comm = factory(options());
    test::check_everything(*comm, slab);
  });
}

TEST_P(ThreadRanks, DelaysChangeNoBit) {
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
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

TEST_P(ThreadRanks, OneLaneIsEnough) {
  // The least slab: one lane, which only the oldest reduction may have.
  run_thread_ranks(GetParam(),
                   [](int, const CommunicatorFactory& factory) {
                     CommunicatorOptions least = options();
                     least.slab_bytes = 1024 * (GetParam() - 1);
                     const auto comm = factory(least);
                     test::check_many_in_flight(*comm, 20);
                   },
                   {0.002, 7});
}

#ifdef __SANITIZE_THREAD__
constexpr int most_ranks = 4;  // instrumented brute force of six ranks takes most of a minute
#else
constexpr int most_ranks = 6;
#endif
INSTANTIATE_TEST_SUITE_P(Sizes, ThreadRanks, testing::Range(1, most_ranks + 1));

TEST(SelfCommunicator, EveryCollectiveMatchesBruteForce) {
  const auto comm = make_self_communicator(options());
  EXPECT_EQ(comm->backend(), "self");
  EXPECT_EQ(comm->size(), 1);
  test::check_everything(*comm, slab);
  EXPECT_EQ(comm->meter().total(Traffic::data).bytes, 0);
}

}  // namespace
}  // namespace tranche
