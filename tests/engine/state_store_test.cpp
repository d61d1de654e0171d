// The state of a rank: the places of elements at every stage and tier, and two stores over different groups.
#include "engine/state_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <mutex>

#include "engine/gradient_reducer.h"
#include "rank_state.h"
#include "tests/core/error_text.h"
#include "tests/offload/test_folder.h"

namespace tranche::test {
namespace {

using detail::ElementRange;
using detail::FlatBuffer;
using detail::GradientReducer;
using detail::ShardSlice;
using detail::StateStore;

TEST(StateStore, SaysWhichTensorsThereAre) {
  const auto alone = make_self_communicator();
  RankState rank(plain_config(2), *alone);
  EXPECT_EQ(rank.store.find_tensor("b.w"), 2);
  EXPECT_EQ(rank.store.index_in_unit(1, "b.frozen"), 1);
  EXPECT_EQ(rank.store.buffer_of(rank.store.tensors()[3]).name, "b frozen");
  EXPECT_EQ(rank.store.trainable().size(), 2u);
  EXPECT_EQ(message_of<InvalidArgument>([&] { (void)rank.store.find_tensor("a.v"); }),
            "the model has no tensor 'a.v'; the closest match is 'a.w'");
  EXPECT_EQ(message_of<InvalidArgument>([&] { (void)rank.store.index_in_unit(0, "b.w"); }),
            "unit a has no tensor b.w; it has a.w, a.b");
  EXPECT_EQ(message_of<InvalidArgument>([&] { (void)rank.store.tensor_in_unit(0, 2); }),
            "unit a has 2 tensors, no index 2");
}

TEST(StateStore, NamesTheTensorOfAnAlias) {
  const auto alone = make_self_communicator();
  RankState rank(plain_config(2), *alone, detail::posix_file_system(), {}, [](detail::StateLayout& layout) {
    layout.tensors[2].aliases = {"head.w", "tied.w"};
  });
  EXPECT_EQ(message_of<InvalidArgument>([&] { (void)rank.store.find_tensor("tied.w"); }),
            "'tied.w' is an alias of tensor 'b.w'; give that name");
}

TEST(ShardSlice, APartOfStateInBlocksBeginsWithOne) {
  std::byte memory[2 * block8_bytes];
  const TensorView state{memory, DataType::block8, Shape{2 * block8_elements}};
  EXPECT_EQ(detail::part_of(state, 1024, {1280, 1536}).data, memory + block8_bytes);
  EXPECT_EQ(message_of<LogicError>([&] {
              (void)detail::part_of(state, 1024, {1124, 1536});
            }),
            "element 100 of block8 is within a block");
}

// Stage 3 keeps a buffer whole if all its tensors are small, as long as the limit for all such buffers allows
// it.
TEST(StateStore, KeepsSmallBuffersWhole) {
  run_thread_ranks(2, [&](int, const CommunicatorFactory& factory) {
    const std::unique_ptr<Communicator> group = factory({});
    // Tensors have 5617 and 7 elements in `a`, 1009 in `b`, 13 in `b frozen`.
    const auto whole = [&](int stage, std::int64_t largest, std::int64_t in_all) {
      Config config = plain_config(stage);
      config.persistent_tensor_elements = largest;
      config.persistent_model_elements = in_all;
      config.offload = in_tiles(4096, OffloadTier::cpu, stage == 3 ? OffloadTier::cpu : OffloadTier::none);
      RankState rank(config, *group);
      std::string names;
      for (const detail::UnitState& unit : rank.store.units()) {
        for (const FlatBuffer& flat : unit.buffers) {
          if (!flat.persistent) continue;
          names += (names.empty() ? "" : ", ") + flat.name;
          EXPECT_TRUE(rank.store.residency().whole_parameters(flat));
          EXPECT_EQ(flat.parameters_tier, OffloadTier::none);
          EXPECT_EQ(flat.parameters.bytes(), flat.layout.padded_elements() * size_of(DataType::float32));
        }
      }
      return names;
    };
    constexpr std::int64_t any = std::numeric_limits<std::int64_t>::max();
    EXPECT_EQ(whole(3, 0, any), "");
    EXPECT_EQ(whole(3, 7, any), "") << "a has a larger tensor";
    EXPECT_EQ(whole(3, 13, any), "b frozen");
    EXPECT_EQ(whole(3, 1009, any), "b, b frozen");
    EXPECT_EQ(whole(3, 1009, 1022), "b, b frozen");
    EXPECT_EQ(whole(3, 1009, 1021), "b");
    EXPECT_EQ(whole(3, 1009, 13), "b frozen");
    EXPECT_EQ(whole(3, 5617, any), "a, b, b frozen");
    EXPECT_EQ(whole(2, 1009, any), "");
  });
}

/// Stages and tiers at which state is written and read back.
struct Kept {
  int stage;
  OffloadTier optimizer, parameters;
};
class StateStoreTiers : public ::testing::TestWithParam<Kept> {};

// Values written through slices are read back through slices for any range, and become the weights that are
// read.
TEST_P(StateStoreTiers, WhatIsWrittenIsRead) {
  const testing::TestFolder folder;
  Config config = plain_config(GetParam().stage);
  config.precision.compute = DataType::bfloat16;
  config.optimizer.parameters["momentum"] = 0.5;
  config.offload = in_tiles(256, GetParam().optimizer, GetParam().parameters);
  run_thread_ranks(3, [&](int, const CommunicatorFactory& factory) {
    const std::unique_ptr<Communicator> group = factory({});
    RankState rank(config, *group, detail::posix_file_system(), folder.path());
    FlatBuffer& flat = *rank.store.trainable()[1];
    const ElementRange kept = rank.store.residency().optimizer_range(flat);
    ASSERT_EQ(kept, GetParam().stage == 0 ? (ElementRange{0, flat.layout.padded_elements()}) : flat.shard());
    // Each element's master weight is its index, and its momentum the negated index.
    rank.store.visit(flat, kept, StateStore::Access::replace, [&](const ShardSlice& slice) {
      ASSERT_EQ(slice.master.elements(), slice.range.size());
      for (std::int64_t i = 0; i < slice.range.size(); ++i) {
        slice.master.as<float>()[i] = static_cast<float>(slice.range.begin + i);
        slice.state[0].as<float>()[i] = -static_cast<float>(slice.range.begin + i);
      }
    });
    std::int64_t seen = 0;
    const ElementRange inner{kept.begin + 100, kept.end - 50};
    rank.store.visit(flat, inner, StateStore::Access::read, [&](const ShardSlice& slice) {
      EXPECT_EQ(slice.range.begin, inner.begin + seen);
      for (std::int64_t i = 0; i < slice.range.size(); ++i, ++seen) {
        ASSERT_EQ(slice.master.as<float>()[i], static_cast<float>(inner.begin + seen));
        ASSERT_EQ(slice.state[0].as<float>()[i], -static_cast<float>(inner.begin + seen));
      }
    });
    EXPECT_EQ(seen, inner.size());
    rank.store.publish(flat, "test");
    flat.gather_done.wait();
    const ElementRange held = rank.store.residency().parameters_range(flat);
    std::vector<bfloat16> weights(static_cast<std::size_t>(held.size()));
    rank.store.read_parameters(flat, held, weights.data());
    // Padding has no values of its own.
    for (std::int64_t i = 0; i < held.size() && held.begin + i < flat.layout.elements(); ++i) {
      ASSERT_EQ(to_float(weights[static_cast<std::size_t>(i)]),
                to_float(to_bfloat16(static_cast<float>(held.begin + i))));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(StagesAndTiers, StateStoreTiers,
                         ::testing::Values(Kept{0, OffloadTier::none, OffloadTier::none},
                                           Kept{1, OffloadTier::none, OffloadTier::none},
                                           Kept{3, OffloadTier::none, OffloadTier::none},
                                           Kept{2, OffloadTier::cpu, OffloadTier::none},
                                           Kept{3, OffloadTier::nvme, OffloadTier::none},
                                           Kept{3, OffloadTier::cpu, OffloadTier::cpu},
                                           Kept{3, OffloadTier::nvme, OffloadTier::nvme},
                                           Kept{3, OffloadTier::none, OffloadTier::nvme}),
                         [](const auto& info) {
                           const auto name = [](OffloadTier tier) { return std::string(name_of(tier)); };
                           return "Stage" + std::to_string(info.param.stage) + name(info.param.optimizer) +
                                  name(info.param.parameters);
                         });

// An observer sees every tile of the nvme tier before a step's update changes it.
TEST(StateStore, AnObserverSeesTilesBeforeTheyChange) {
  struct Observer : detail::StateObserver {
    void before_update(const FlatBuffer&, const ShardSlice& slice) override {
      slice.stream->enqueue("look", [this, slice] {
        for (std::int64_t i = 0; i < slice.range.size(); ++i) changed += slice.master.as<float>()[i] == 3.0f;
        elements += slice.range.size();
      });
    }
    void updates_issued(Stream&) override { ++issued; }
    void before_write() override { ++writes; }
    std::int64_t elements = 0, changed = 0;
    int issued = 0, writes = 0;
  };
  const testing::TestFolder folder;
  Config config = plain_config(1);
  config.offload = in_tiles(256, OffloadTier::nvme);
  const auto alone = make_self_communicator();
  RankState rank(config, *alone, detail::posix_file_system(), folder.path());
  Observer observer;
  rank.store.observe(&observer);
  detail::OffloadedState& offload = *rank.store.offload();
  offload.begin_update();
  for (FlatBuffer* flat : rank.store.trainable()) {
    for (std::int64_t tile = 0; tile < offload.update_tiles(*flat); ++tile) {
      const ShardSlice slice = offload.open_tile(*flat, tile, rank.store.observer());
      slice.stream->enqueue("change",
                            [slice] { std::fill_n(slice.master.as<float>(), slice.range.size(), 3.0f); });
      offload.close_tile();
    }
  }
  offload.end_update();
  offload.await_updates();
  EXPECT_EQ(observer.elements, rank.store.trainable()[0]->layout.padded_elements() +
                                   rank.store.trainable()[1]->layout.padded_elements());
  EXPECT_EQ(observer.changed, 0);
  EXPECT_EQ(observer.issued, 0) << "which the step's boundary says, behind whole matrices";
  EXPECT_EQ(observer.writes, 0);
  FlatBuffer& flat = *rank.store.trainable()[0];
  rank.store.visit(flat, {0, 10}, StateStore::Access::update,
                   [&](const ShardSlice& slice) { EXPECT_EQ(slice.master.as<float>()[9], 3.0f); });
  EXPECT_EQ(observer.writes, 1);
  rank.store.observe(nullptr);
}

// Each flat buffer belongs to a group. One process has two stores, one sharded over all four ranks and one
// over pairs. Their tensors are equal, and gradients are summed over each store's own group.
TEST(StateStore, TwoStoresOverDifferentGroups) {
  run_thread_ranks(4, [](int rank_number, const CommunicatorFactory& factory) {
    const std::unique_ptr<Communicator> world = factory({});
    const std::unique_ptr<Communicator> pair = world->split(rank_number / 2, rank_number);
    RankState all(plain_config(3), *world), two(plain_config(3), *pair);
    EXPECT_EQ(all.store.trainable()[1]->layout.ranks(), 4);
    EXPECT_EQ(two.store.trainable()[1]->layout.ranks(), 2);
    for (const char* tensor : {"a.w", "a.b", "b.w", "b.frozen"}) {
      EXPECT_EQ(all.weight(tensor), two.weight(tensor)) << tensor;
    }
    for (RankState* rank : {&all, &two}) {
      GradientReducer reducer(rank->store, rank->arena, rank->compute, rank->ledger, rank->scalars, nullptr);
      rank->arena.begin("train", false);
      reducer.begin_micro_batch(0);
      reducer.open(0, 0);
      rank->add(reducer.view(0, 0, 0), static_cast<float>(rank_number + 1));
      reducer.submit(0, 0, /*last=*/true);
      const std::vector<float> sum = rank->access().main_gradient(0, true, 1 << 30);
      const float expected = rank == &all ? 10.0f : rank_number < 2 ? 3.0f : 7.0f;
      EXPECT_EQ(std::count(sum.begin(), sum.end(), expected), 137 * 41);
      reducer.end_micro_batch(0);
      rank->arena.end();
    }
  });
}

}  // namespace
}  // namespace tranche::test
