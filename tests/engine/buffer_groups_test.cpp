// Flat buffers with groups of their own in one store. Each is sharded over the ranks that hold its values,
// its gradient is their sum, and the norm counts every element once.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <thread>

#include "engine/formulas.h"
#include "engine/gradient_reducer.h"
#include "engine/parameter_gatherer.h"
#include "engine/step_boundary.h"
#include "rank_state.h"
#include "tranche/core/error.h"

namespace tranche::test {
namespace {

using detail::FlatBuffer;
using detail::FlatLayout;
using detail::GradientReducer;
using detail::ParameterGatherer;
using detail::Program;
using detail::StateLayout;
using detail::StepBoundary;

/// Divides a buffer again, over other ranks.
void regroup(FlatBuffer& flat, Communicator& group, Communicator* replicas) {
  std::vector<std::int64_t> sizes;
  for (int tensor = 0; tensor < flat.layout.tensors(); ++tensor) {
    sizes.push_back(flat.layout.tensor_elements(tensor));
  }
  flat =
      FlatBuffer(flat.name, flat.trainable, &group, replicas,
                 FlatLayout(sizes, group.size(), replicas == nullptr ? 1 : replicas->size()), flat.tensors);
}

/// On four ranks, pairs hold unit a with their own values (like two pipeline stages, or halves of a sliced
/// layer). Unit b, which is used twice, is tied over all ranks. Its frozen tensor is sharded over pairs that
/// have copies of it.
class BufferGroups : public ::testing::TestWithParam<std::tuple<int, ReductionPolicy, bool>> {};

TEST_P(BufferGroups, ReduceGatherAndUpdateByTheirOwnGroups) {
  const auto [stage, policy, tied_in_replicas] = GetParam();
  Config config = plain_config(stage);
  config.reduction = policy;
  config.replicate = stage > 1 ? Replicate::parameters : Replicate::all;
  run_thread_ranks(4, [&](int rank_number, const CommunicatorFactory& factory) {
    const std::unique_ptr<Communicator> all = factory({});
    const std::array<std::array<int, 2>, 2> pairs = {{{0, 1}, {2, 3}}}, across = {{{0, 2}, {1, 3}}};
    const auto own = static_cast<std::size_t>(rank_number);
    const std::unique_ptr<Communicator> pair = all->subgroup(pairs[own / 2]);
    const std::unique_ptr<Communicator> copies = all->subgroup(across[own % 2]);
    RankState rank(config, *all, detail::posix_file_system(), {}, [&](StateLayout& layout) {
      regroup(layout.units[0].buffers[0], *pair, nullptr);
      if (tied_in_replicas) regroup(layout.units[1].buffers[0], *pair, copies.get());
      regroup(layout.units[1].buffers[1], *pair, copies.get());
    });
    {
      GradientReducer reducer(rank.store, rank.arena, rank.compute, rank.ledger, rank.scalars, nullptr);
      ParameterGatherer gatherer(rank.store, detail::GatherOptions(rank.config), rank.arena, rank.compute,
                                 rank.exposed);
      StepBoundary boundary(rank.store, rank.config, rank.updater, rank.matrices, *all, rank.mesh,
                            *rank.device, rank.scalars, rank.pieces);
      boundary.allocate(rank.memory);
      const std::vector<float> a = rank.weight("a.w"), b = rank.weight("b.w"),
                               frozen = rank.weight("b.frozen");

      rank.arena.begin("train", false);
      gatherer.begin_sequence(Program::train, false);
      for (int unit = 0; unit < 2; ++unit) {
        gatherer.acquire(unit);
        const ConstTensorView held = gatherer.view(unit, 0);
        rank.compute.synchronize();
        const std::vector<float>& expected = unit == 0 ? a : b;
        ASSERT_EQ(held.elements(), static_cast<std::int64_t>(expected.size()));
        EXPECT_EQ(std::memcmp(held.data, expected.data(), expected.size() * sizeof(float)), 0) << unit;
        gatherer.release(unit, ParameterGatherer::Ahead::now);
      }
      gatherer.end_sequence();
      reducer.begin_micro_batch(0);
      for (const int unit : {0, 1, 1}) {
        reducer.open(0, unit);
        rank.add(reducer.view(0, unit, 0), static_cast<float>(rank_number + 1));
        if (unit == 0) rank.add(reducer.view(0, 0, 1), static_cast<float>(rank_number + 1));
        reducer.submit(0, unit, true);
      }
      reducer.end_micro_batch(0);
      rank.compute.synchronize();
      for (const FlatBuffer* flat : rank.store.trainable()) rank.compute.wait(flat->reduce_done);
      rank.scalars.losses()[0] = 2.5;
      rank.scalars.tokens()[0] = 10;
      rank.arena.end();

      const float of_pair = rank_number < 2 ? 1 + 2 : 3 + 4, of_all = 2 * (1 + 2 + 3 + 4);
      EXPECT_THAT(rank.access().main_gradient(0, true, 1), ::testing::Each(of_pair));
      EXPECT_THAT(rank.access().main_gradient(2, true, 1), ::testing::Each(of_all));
      const StepBoundary::Agreement found = boundary.agree({}, 1, 1);
      EXPECT_EQ(found.sum_of_squares, (9.0 + 49.0) * (137 * 41 + 7) + 400.0 * 1009)
          << "both pairs' elements, and the tied ones once";
      OptimizerStep step;
      step.learning_rate = 0.25;
      step.gradient_scale = 0.5f;
      step.apply = true;
      boundary.update(step);
      const auto updated = [](std::vector<float> values, float gradient) {
        for (float& value : values) value -= 0.25f * (gradient * 0.5f);
        return values;
      };
      EXPECT_EQ(rank.weight("a.w"), updated(a, of_pair));
      EXPECT_EQ(rank.weight("b.w"), updated(b, of_all));
      EXPECT_EQ(rank.weight("b.frozen"), frozen);

      // Models read the new weights.
      rank.arena.begin("train", false);
      gatherer.begin_sequence(Program::train, false);
      for (int unit = 0; unit < 2; ++unit) {
        gatherer.acquire(unit);
        const ConstTensorView held = gatherer.view(unit, 0);
        rank.compute.synchronize();
        EXPECT_EQ(*held.as<float>(), unit == 0 ? updated(a, of_pair)[0] : updated(b, of_all)[0]);
        gatherer.release(unit, ParameterGatherer::Ahead::now);
      }
      gatherer.end_sequence();
      rank.compute.synchronize();
      rank.arena.end();
    }
    all->barrier({"test", "end"}).wait();
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, BufferGroups,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3),
                                            ::testing::Values(ReductionPolicy::boundary,
                                                              ReductionPolicy::micro_batch),
                                            ::testing::Bool()));

// A step holds two buffers beside the state: the slot of a unit, and the group's sum while it is sent to the
// other copies.
TEST(BufferCopies, TheFormulaHasTheSumOfAReplica) {
  run_thread_ranks(4, [&](int rank_number, const CommunicatorFactory& factory) {
    const std::unique_ptr<Communicator> all = factory({});
    const std::array<std::array<int, 2>, 2> pairs = {{{0, 1}, {2, 3}}}, across = {{{0, 2}, {1, 3}}};
    const auto own = static_cast<std::size_t>(rank_number);
    const std::unique_ptr<Communicator> pair = all->subgroup(pairs[own / 2]);
    const std::unique_ptr<Communicator> copies = all->subgroup(across[own % 2]);
    for (const ReplicaSum sum : {ReplicaSum::micro_batch, ReplicaSum::step}) {
      Config config = plain_config(2);
      config.replica_sum = sum;
      RankState rank(config, *all, detail::posix_file_system(), {}, [&](StateLayout& layout) {
        for (detail::UnitState& unit : layout.units) {
          for (FlatBuffer& flat : unit.buffers) regroup(flat, *pair, copies.get());
        }
      });
      const detail::FlatLayout& a = rank.store.units()[0].buffers[0].layout;
      const detail::FlatLayout& b = rank.store.units()[1].buffers[0].layout;
      const detail::FlatLayout& frozen = rank.store.units()[1].buffers[1].layout;
      EXPECT_EQ(a.shard_elements(), 3072) << "5,639 elements in four parts of a multiple of 256";
      const std::int64_t state = a.padded_elements() + b.padded_elements() + frozen.padded_elements() +
                                 a.shard_elements() + b.shard_elements();
      const std::int64_t tied = b.padded_elements();
      const std::int64_t reduction =
          a.padded_elements() + (sum == ReplicaSum::micro_batch ? a.shard_elements() : 0);
      const ModelSpec model = two_units();
      const detail::StateFormulas formulas(rank.config, model, rank.store, rank.updater);
      EXPECT_EQ(formulas.resident_bytes(2), 4 * (state + tied + reduction));
      EXPECT_EQ(formulas.bytes().parameters + formulas.bytes().gradients, 4 * state);
    }
    all->barrier({"test", "end"}).wait();
  });
}

// A wait for the buffer after an error waits for the work issued before it.
TEST(BufferCopies, AnErrorOfTheSumOverReplicasLeavesTheEventOfTheGroups) {
  std::atomic<bool> began = false;  // rank 0 has left the barrier, which a failure would end with an error
  run_thread_ranks(2, [&](int rank_number, const CommunicatorFactory& factory) {
    const std::unique_ptr<Communicator> all = factory({}), alone = make_self_communicator();
    RankState rank(plain_config(2), *alone, detail::posix_file_system(), {},
                   [&](StateLayout& layout) { regroup(layout.units[0].buffers[0], *alone, all.get()); });
    all->barrier({"test", "begin"}).wait();
    if (rank_number == 0) began = true;
    if (rank_number == 1) {
      while (!began) std::this_thread::yield();
      all->post_failure("ended by the test", ExitStatus::communication, 1);
      return;
    }
    const auto failed = [&] {
      try {
        all->check_health();
        return false;
      } catch (const CommunicationError&) {
        return true;
      }
    };
    while (!failed()) std::this_thread::yield();
    rank.arena.begin("train", false);
    {
      GradientReducer reducer(rank.store, rank.arena, rank.compute, rank.ledger, rank.scalars, nullptr);
      reducer.begin_micro_batch(0);
      reducer.open(0, 0);
      EXPECT_THROW(reducer.submit(0, 0, true), CommunicationError);
      const Event& reduced = rank.store.trainable()[0]->reduce_done;
      EXPECT_TRUE(reduced.state()) << "the sum of the group was issued";
      reduced.wait();
    }
    rank.arena.end();
  });
}

}  // namespace
}  // namespace tranche::test
