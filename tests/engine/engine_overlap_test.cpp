// Communication during compute: which units are prefetched, which reductions run during compute, how far
// ahead, and when there is none.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "core/clock.h"
#include "on_ranks.h"
#include "tranche/core/trace.h"

namespace tranche::test {
namespace {

/// The number of communication spans of `unit` that have been recorded.
int spans_of(Runtime& runtime, const std::string& unit) {
  const std::string trace = runtime.trace()->to_json();
  int count = 0;
  for (std::size_t at = trace.find(unit); at != std::string::npos; at = trace.find(unit, at + 1)) ++count;
  return count;
}

/// Waits at most `seconds` until `unit` has more than `before` spans; returns whether it has.
bool more_spans(Runtime& runtime, const std::string& unit, int before, double seconds) {
  const detail::Stopwatch watch;
  while (spans_of(runtime, unit) <= before && watch.seconds() < seconds) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return spans_of(runtime, unit) > before;
}

/// Runs one micro-batch of the odd model's units on two ranks. In it the compute stream waits until a
/// collective that was issued before has ended, which is possible only if communication progresses while the
/// rank computes. Returns true if it ended within `seconds`.
bool collective_ends_inside_compute(int stage, bool overlap, double seconds = 30,
                                    const std::function<void(Config&)>& change = {}) {
  OddRun run;
  run.ranks = 2;
  run.stage = stage;
  run.overlap = overlap;
  std::atomic<int> ended = 0;
  run_thread_ranks(run.ranks, [&](int, const CommunicatorFactory& factory) {
    Config config = odd_config(run);
    if (change) change(config);
    RuntimeOptions options = RuntimeOptions::from(config);
    options.trace = true;
    Runtime runtime(options, factory);
    Engine engine(runtime, odd_model(), config);
    whole_step(engine, runtime, 0);
    engine.step();
    const auto wait_inside_compute = [&](const std::string& unit, int before) {
      engine.compute_stream().enqueue("compute", [&, before] {
        if (more_spans(runtime, unit, before, seconds)) ++ended;
      });
    };
    engine.begin_micro_batch();
    if (stage == 3) {
      const int before = spans_of(runtime, "prime");
      const GatheredUnit weights = engine.gather({0});
      wait_inside_compute("prime", before);  // the unit after the one in use is being prefetched
      for (int unit = 3; unit >= 0; --unit) engine.skip_gradients({unit});
    } else {
      for (int unit = 0; unit < 4; ++unit) static_cast<void>(engine.gather({unit}));
      const int before = spans_of(runtime, "mixed");
      engine.skip_gradients({3});
      wait_inside_compute("mixed", before);  // its reduction runs during the backward of other units
      for (int unit = 2; unit >= 0; --unit) engine.skip_gradients({unit});
    }
    end_with(engine, 0, 1);
    engine.step();
  });
  return ended == 2;
}

TEST(EngineOverlap, ReductionsMoveWhileTheRankComputes) {
  EXPECT_TRUE(collective_ends_inside_compute(2, true));
}

TEST(EngineOverlap, GathersRunAheadWhileTheRankComputes) {
  EXPECT_TRUE(collective_ends_inside_compute(3, true));
  // This check shows that the test can fail: without overlap nothing is prefetched.
  EXPECT_FALSE(collective_ends_inside_compute(3, false, 0.2));
}

TEST(EngineOverlap, UnitsLargerThanThePrefetchBucketAreFetchedAheadToo) {
  EXPECT_TRUE(collective_ends_inside_compute(3, true, 30, [](Config& config) {
    config.prefetch_elements = 1;
    config.max_live_elements = 1;
  }));
}

/// Two ranks in stage 3, after a step in which the order of units was recorded, with traces.
void on_recorded_ranks(const OddRun& run, const std::function<void(Config&)>& change,
                       const std::function<void(Engine&, Runtime&)>& body) {
  run_thread_ranks(
      run.ranks,
      [&](int, const CommunicatorFactory& factory) {
        Config config = odd_config(run);
        change(config);
        RuntimeOptions options = RuntimeOptions::from(config);
        options.trace = true;
        Runtime runtime(options, factory);
        Engine engine(runtime, odd_model(), config);
        whole_step(engine, runtime, 0);
        engine.step();
        body(engine, runtime);
      },
      run.faults);
}

TEST(EngineOverlap, LimitsOfWhatIsFetchedAhead) {
  OddRun run;
  run.ranks = 2;
  run.stage = 3;
  const auto fetched_ahead = [&](const std::string& unit, int depth, std::int64_t prefetch, std::int64_t live,
                                 double seconds) {
    std::atomic<int> fetched = 0;
    const auto change = [&](Config& config) {
      config.depth = depth;
      config.prefetch_elements = prefetch;
      config.max_live_elements = live;
    };
    on_recorded_ranks(run, change, [&](Engine& engine, Runtime& runtime) {
      engine.begin_micro_batch();
      const int before = spans_of(runtime, unit);
      const GatheredUnit weights = engine.gather({0});
      if (more_spans(runtime, unit, before, seconds)) ++fetched;
    });
    return fetched == 2;
  };
  // Sizes on two ranks with padding: tied, which is in use, has 512 elements, prime, the next one, 1536, and
  // tiny 512. The next unit is prefetched whatever the keys say, unless prefetching is off.
  EXPECT_TRUE(fetched_ahead("prime", 2, 0, 0, 60));
  EXPECT_FALSE(fetched_ahead("prime", 1, 5000, 5000, 0.1));
  // Units after it are limited. The next one does not count as prefetched but counts as live.
  EXPECT_TRUE(fetched_ahead("tiny", 3, 512, 2560, 60));
  EXPECT_FALSE(fetched_ahead("tiny", 3, 511, 2560, 0.1));
  EXPECT_FALSE(fetched_ahead("tiny", 3, 512, 2559, 0.1));
  EXPECT_FALSE(fetched_ahead("tiny", 2, 512, 2560, 0.1));
}

TEST(EngineOverlap, TheNextMicroBatchIsFetchedAheadButNotTheNextStep) {
  OddRun run;
  run.ranks = 2;
  run.stage = 3;
  run.accumulation = 2;
  on_recorded_ranks(
      run, [](Config&) {},
      [&](Engine& engine, Runtime& runtime) {
        // A micro-batch gathers prime twice, and its end gathers the first two units of the next: tied and
        // prime.
        const std::string gather = "all_gather of unit prime";
        const int before = spans_of(runtime, gather);
        odd_micro_batch(engine, 0, 1);
        EXPECT_TRUE(more_spans(runtime, gather, before + 2, 60));
        odd_micro_batch(engine, 0, 1);
        EXPECT_FALSE(more_spans(runtime, gather, before + 4, 0.05)) << "weights that the step will change";
        engine.step();
      });
}

TEST(EngineOverlap, OffMeansDoneOnReturn) {
  OddRun run;
  run.ranks = 2;
  run.overlap = false;
  run.faults = {0.004, 5};  // delays before every operation, so that nothing is complete by chance
  for (const int stage : {0, 2, 3}) {
    run.stage = stage;
    on_recorded_ranks(
        run, [](Config&) {},
        [&](Engine& engine, Runtime& runtime) {
          engine.begin_micro_batch();
          for (int unit = 3; unit >= 0; --unit) {
            const std::string name = engine.model().units()[static_cast<std::size_t>(unit)].name;
            const int before = spans_of(runtime, name);
            engine.skip_gradients({unit});
            EXPECT_EQ(spans_of(runtime, name), before + (stage == 0 ? 2 : 1)) << name << " stage " << stage;
          }
          end_with(engine, 0, 1);
          engine.step();
        });
  }
}

TEST(EngineOverlap, ReductionsOfAUnitKeepTheirOrder) {
  // There is one unit, reduced in each micro-batch, with drawn delays far longer than the time between. If
  // one reduction overtook another, sums would be lost or added in another order.
  OddRun run;
  run.ranks = 2;
  run.single_unit = true;
  run.frozen = false;
  run.accumulation = 6;
  run.policy = ReductionPolicy::micro_batch;
  run.steps = 3;
  run.samples_per_micro_batch = 2;
  run.overlap = false;
  const OddResult expected = train_odd(run);
  run.overlap = true;
  for (run.stage = 0; run.stage <= 3; ++run.stage) {
    run.faults = {0.003, static_cast<std::uint64_t>(run.stage)};
    const OddResult actual = train_odd(run);
    EXPECT_EQ(actual.state, expected.state) << run.to_string();
  }
}

}  // namespace
}  // namespace tranche::test
