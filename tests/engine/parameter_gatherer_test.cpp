// Gathering without an engine: on demand, ahead in the recorded order, and limited by the depth.
#include "engine/parameter_gatherer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "rank_state.h"
#include "tests/core/error_text.h"

namespace tranche::test {
namespace {

using detail::ParameterGatherer;
using detail::Program;
using Ahead = ParameterGatherer::Ahead;

std::vector<float> values_of(RankState& rank, const ConstTensorView& view) {
  rank.compute.synchronize();
  std::vector<float> values(static_cast<std::size_t>(view.elements()));
  std::memcpy(values.data(), view.data, values.size() * sizeof(float));
  return values;
}

/// Runs `body` on two ranks at stage 3 with an active pass of the arena.
void on_two_ranks(const std::function<void(RankState&, ParameterGatherer&)>& body, int depth = 2,
                  GatherFor gather_for = GatherFor::use) {
  run_thread_ranks(2, [&](int, const CommunicatorFactory& factory) {
    const std::unique_ptr<Communicator> group = factory({});
    Config config = plain_config(3);
    config.depth = depth;
    config.gather_for = gather_for;
    RankState rank(config, *group);
    rank.arena.begin("train", false);
    {
      ParameterGatherer gatherer(rank.store, detail::GatherOptions(rank.config), rank.arena, rank.compute,
                                 rank.exposed);
      body(rank, gatherer);
    }
    rank.arena.end();
    group->barrier({"test", "end"}).wait();
  });
}

TEST(ParameterGatherer, GivesWholeTensors) {
  on_two_ranks([](RankState& rank, ParameterGatherer& gatherer) {
    gatherer.begin_sequence(Program::train, false);
    for (int unit = 0; unit < 2; ++unit) {
      gatherer.acquire(unit);
      for (int index = 0; index < 2; ++index) {
        const std::string name = rank.store.tensor_in_unit(unit, index).name;
        const std::vector<float> held = values_of(rank, gatherer.view(unit, index));
        EXPECT_EQ(held, rank.weight(name)) << name;
      }
      gatherer.release(unit, Ahead::now);
    }
    gatherer.end_sequence();
    EXPECT_EQ(gatherer.take_gathered_elements(),
              rank.store.units()[0].gathered_elements() + rank.store.units()[1].gathered_elements());
    EXPECT_EQ(gatherer.take_gathered_elements(), 0);
  });
}

// In the second sequence each request also prefetches the next unit; the last has no successor unless another
// sequence follows.
TEST(ParameterGatherer, GathersAheadInTheRecordedOrder) {
  on_two_ranks([](RankState& rank, ParameterGatherer& gatherer) {
    const std::int64_t a = rank.store.units()[0].gathered_elements();
    const std::int64_t b = rank.store.units()[1].gathered_elements();
    for (const bool another : {true, false}) {
      const bool recorded = !another;
      gatherer.begin_sequence(Program::train, another);
      gatherer.acquire(0);
      EXPECT_EQ(gatherer.take_gathered_elements(), recorded ? b : a) << "what the one before left is there";
      gatherer.release(0, Ahead::now);
      gatherer.acquire(1);
      EXPECT_EQ(gatherer.take_gathered_elements(), recorded ? 0 : b);
      gatherer.release(1, Ahead::now);
      gatherer.end_sequence();
      EXPECT_EQ(gatherer.take_gathered_elements(), 0);
      if (recorded) continue;
      // Now the order is known to repeat, so the first unit stays gathered.
      gatherer.begin_sequence(Program::train, true);
      gatherer.acquire(0);
      EXPECT_EQ(gatherer.take_gathered_elements(), a + b);
      gatherer.release(0, Ahead::now);
      gatherer.acquire(1);
      EXPECT_EQ(gatherer.take_gathered_elements(), a);
      gatherer.release(1, Ahead::now);
      gatherer.end_sequence();
    }
  });
}

// The order differs from the recorded one: the prefetched unit is dropped, and the new order becomes the
// recorded one.
TEST(ParameterGatherer, TakesOverAnotherOrder) {
  on_two_ranks([](RankState& rank, ParameterGatherer& gatherer) {
    const std::int64_t all =
        rank.store.units()[0].gathered_elements() + rank.store.units()[1].gathered_elements();
    for (int sequence = 0; sequence < 4; ++sequence) {
      gatherer.begin_sequence(Program::train, false);
      const bool reversed = sequence >= 1;
      for (const int unit : {reversed ? 1 : 0, reversed ? 0 : 1}) {
        gatherer.acquire(unit);
        gatherer.release(unit, Ahead::now);
      }
      gatherer.end_sequence();
      EXPECT_EQ(gatherer.take_gathered_elements(), all) << sequence;
    }
  });
}

TEST(ParameterGatherer, RefusesMoreUnitsThanItsDepth) {
  on_two_ranks(
      [](RankState&, ParameterGatherer& gatherer) {
        gatherer.begin_sequence(Program::train, false);
        gatherer.acquire(1);
        EXPECT_EQ(gatherer.holders(1), 1);
        EXPECT_EQ(
            message_of<LogicError>([&] { gatherer.acquire(0); }),
            "gather(a) would hold 2 units at once, but tranche.depth is 1; held now: b. Let a handle go "
            "first or raise tranche.depth");
        gatherer.acquire(1);  // a second handle of a held unit takes no memory
        gatherer.release(1, Ahead::now);
        gatherer.release(1, Ahead::now);
        gatherer.end_sequence();
      },
      1);
}

// A unit released by an exception prefetches nothing; the next call does.
TEST(ParameterGatherer, OwesWhatAnExceptionLetGo) {
  on_two_ranks(
      [](RankState& rank, ParameterGatherer& gatherer) {
        for (int sequence = 0; sequence < 2; ++sequence) {
          gatherer.begin_sequence(Program::train, false);
          gatherer.acquire(0);
          (void)gatherer.take_gathered_elements();
          gatherer.release(0, sequence == 0 ? Ahead::now : Ahead::later);
          EXPECT_EQ(gatherer.take_gathered_elements(), 0);
          gatherer.catch_up();
          EXPECT_EQ(gatherer.take_gathered_elements(),
                    sequence == 0 ? 0 : rank.store.units()[1].gathered_elements());
          gatherer.acquire(1);
          gatherer.release(1, Ahead::never);
          gatherer.end_sequence();
        }
      },
      1);
}

// A unit stays for later sequences of its step, in any order and number; the next step gathers it again.
TEST(ParameterGatherer, KeepsForAStep) {
  for (const int depth : {1, 2}) {
    on_two_ranks(
        [depth](RankState& rank, ParameterGatherer& gatherer) {
          const std::int64_t a = rank.store.units()[0].gathered_elements();
          const std::int64_t b = rank.store.units()[1].gathered_elements();
          for (int step = 0; step < 3; ++step) {
            const bool ahead = step > 0 && depth > 1;
            gatherer.begin_sequence(Program::train, true);
            gatherer.acquire(0);
            EXPECT_EQ(gatherer.take_gathered_elements(), ahead ? a + b : a);
            gatherer.acquire(1);  // more than a depth of 1
            EXPECT_EQ(gatherer.take_gathered_elements(), ahead ? 0 : b);
            const void* const place = gatherer.view(1, 0).data;
            EXPECT_EQ(values_of(rank, gatherer.view(1, 0)), rank.weight("b.w"));
            gatherer.release(0, Ahead::now);
            gatherer.release(1, Ahead::now);
            gatherer.end_sequence();
            gatherer.begin_sequence(Program::train, false);
            for (const int unit : {1, 0, 0, 1}) {
              gatherer.acquire(unit);
              gatherer.release(unit, Ahead::now);
            }
            EXPECT_EQ(gatherer.view(1, 0).data, place);
            gatherer.end_sequence();
            gatherer.end_step();
            EXPECT_EQ(gatherer.take_gathered_elements(), 0) << "gathered once a step";
            // Forward passes between steps gather for each use.
            gatherer.begin_sequence(Program::infer, false);
            gatherer.acquire(1);
            if (depth == 1) {
              EXPECT_THAT(message_of<LogicError>([&] { gatherer.acquire(0); }),
                          ::testing::HasSubstr("tranche.depth is 1"));
            }
            gatherer.release(1, Ahead::now);
            gatherer.end_sequence();
            EXPECT_EQ(gatherer.take_gathered_elements(), b);
            // The order of training is again the first sequence's.
            gatherer.begin_sequence(Program::train, false);
            for (const int unit : {0, 1}) {
              gatherer.acquire(unit);
              gatherer.release(unit, Ahead::now);
            }
            gatherer.end_sequence();
            gatherer.end_step();
            EXPECT_EQ(gatherer.take_gathered_elements(), a + b);
          }
        },
        depth, GatherFor::step);
  }
}

// Forward passes have a separate order, and an abandoned one leaves nothing behind.
TEST(ParameterGatherer, ProgramsHaveOrdersOfTheirOwn) {
  on_two_ranks([](RankState& rank, ParameterGatherer& gatherer) {
    const std::int64_t a = rank.store.units()[0].gathered_elements();
    const auto pass = [&](Program program) {
      gatherer.begin_sequence(program, false);
      gatherer.acquire(0);
      const std::int64_t gathered = gatherer.take_gathered_elements();
      gatherer.release(0, Ahead::now);
      gatherer.acquire(1);
      gatherer.release(1, Ahead::now);
      gatherer.end_sequence();
      (void)gatherer.take_gathered_elements();
      return gathered;
    };
    EXPECT_EQ(pass(Program::train), a);
    EXPECT_GT(pass(Program::train), a) << "gathers ahead";
    EXPECT_EQ(pass(Program::infer), a) << "not recorded yet";
    EXPECT_GT(pass(Program::infer), a);
    gatherer.begin_sequence(Program::infer, false);
    gatherer.acquire(0);
    gatherer.release(0, Ahead::never);
    gatherer.abandon_sequence();
    EXPECT_FALSE(gatherer.in_sequence());
    (void)gatherer.take_gathered_elements();
    EXPECT_EQ(pass(Program::infer), a) << "recorded anew";
  });
}

}  // namespace
}  // namespace tranche::test
