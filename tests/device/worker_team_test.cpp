#include "device/worker_team.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <numeric>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "device/cpu/cpu_streams.h"
#include "tranche/core/error.h"

namespace tranche {
namespace {

using detail::WorkerTeam;
using testing::Each;
using testing::HasSubstr;

TEST(WorkerTeam, EveryPartRunsOnceWhateverTheNumbers) {
  for (const int threads : {1, 2, 3, 5}) {
    WorkerTeam team(threads);
    EXPECT_EQ(team.threads(), threads);
    for (const int parts : {0, 1, 2, 3, 7, 64, 1}) {
      std::vector<int> runs(static_cast<std::size_t>(parts), 0);
      team.run(parts, [&](int part) { ++runs[static_cast<std::size_t>(part)]; });
      EXPECT_THAT(runs, Each(1)) << threads << " threads, " << parts << " parts";
    }
  }
}

TEST(WorkerTeam, WhatPartsWroteIsSeenBehindRun) {
  WorkerTeam team(3);
  std::vector<long> values(7, 0);
  for (long loop = 1; loop <= 2000; ++loop) {
    team.run(7, [&](int part) { values[static_cast<std::size_t>(part)] += loop; });
    ASSERT_EQ(std::accumulate(values.begin(), values.end(), 0L), 7 * loop * (loop + 1) / 2);
  }
}

TEST(WorkerTeam, PartsRunAtTheSameTimeOnSeveralThreads) {
  WorkerTeam team(2);
  std::atomic<int> inside{0};
  std::mutex mutex;
  std::set<std::thread::id> who;
  // Each waits for the other, so one thread alone would never end.
  team.run(2, [&](int) {
    ++inside;
    while (inside.load() < 2) std::this_thread::yield();
    std::lock_guard lock(mutex);
    who.insert(std::this_thread::get_id());
  });
  EXPECT_EQ(who.size(), 2U);
  EXPECT_TRUE(who.contains(std::this_thread::get_id()));
}

TEST(WorkerTeam, RethrowsAfterAllThatBeganAreDoneAndRunsOn) {
  WorkerTeam team(3);
  for (int loop = 0; loop < 200; ++loop) {
    std::atomic<int> inside{0};
    EXPECT_THAT(
        [&] {
          team.run(16, [&](int part) {
            ++inside;
            if (part == 5) {
              --inside;
              throw std::runtime_error("part 5 fell");
            }
            --inside;
          });
        },
        testing::ThrowsMessage<std::runtime_error>("part 5 fell"));
    ASSERT_EQ(inside.load(), 0);
  }
  int sum = 0;
  std::mutex mutex;
  team.run(4, [&](int part) {
    std::lock_guard lock(mutex);
    sum += part;
  });
  EXPECT_EQ(sum, 6);
}

TEST(WorkerTeam, NeedsAThread) {
  EXPECT_THAT([] { WorkerTeam team(0); },
              testing::ThrowsMessage<InvalidArgument>(HasSubstr("at least one thread, not 0")));
}

TEST(WorkerTeam, IsLentToAStreamsThreadAlone) {
  EXPECT_EQ(WorkerTeam::of_this_thread(), nullptr);
  detail::CpuWorkerStream stream("host update", 3);
  int threads = 0;
  stream.enqueue("look", [&] { threads = WorkerTeam::of_this_thread()->threads(); });
  stream.synchronize();
  EXPECT_EQ(threads, 3);
  EXPECT_EQ(WorkerTeam::of_this_thread(), nullptr);
  WorkerTeam outer(1), inner(2);
  {
    const WorkerTeam::Loan first(outer);
    {
      const WorkerTeam::Loan second(inner);
      EXPECT_EQ(WorkerTeam::of_this_thread(), &inner);
    }
    EXPECT_EQ(WorkerTeam::of_this_thread(), &outer);
  }
  EXPECT_EQ(WorkerTeam::of_this_thread(), nullptr);
}

}  // namespace
}  // namespace tranche
