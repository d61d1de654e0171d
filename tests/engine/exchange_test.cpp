// Exchanges without an engine: those that a buffer has, their memory, and their results.
#include "engine/exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "rank_state.h"
#include "tranche/kernels/quantization.h"

namespace tranche::test {
namespace {

using detail::GradientExchange;

constexpr OperationLabel exchange_label{"test", "exchange"};

Config in_blocks(int stage, bool blocks) {
  Config config = plain_config(stage);
  config.reduction = ReductionPolicy::micro_batch;
  config.quantized_gradients = config.quantized_weights = blocks;
  return config;
}

TEST(Exchange, IsWhatTheConfigurationWantsForABuffer) {
  run_thread_ranks(2, [](int, const CommunicatorFactory& factory) {
    const std::unique_ptr<Communicator> group = factory({});
    for (const bool blocks : {false, true}) {
      Config config = in_blocks(2, blocks);
      config.precision.communication = DataType::bfloat16;
      RankState rank(config, *group);
      detail::FlatBuffer& trained = rank.store.units()[1].buffers[0];
      const detail::FlatBuffer& frozen = rank.store.units()[1].buffers[1];
      EXPECT_EQ(frozen.gradients_over, nullptr);
      EXPECT_FALSE(frozen.weights->rounds());
      EXPECT_EQ(trained.weights->rounds(), blocks);
      const std::int64_t padded = trained.layout.padded_elements();
      const GradientExchange::Bytes bytes = trained.gradients_over->bytes(trained, DataType::float32);
      EXPECT_EQ(bytes.sent, blocks ? kernels::quantized_bytes(padded) : 2 * padded);
      EXPECT_EQ(bytes.received, blocks ? kernels::quantized_bytes(padded) : 0);
      if (!blocks) {
        EXPECT_EQ(trained.gradients_over->bytes(trained, DataType::bfloat16).sent, 0) << "sent as it is";
      }
    }
  });
}

// Rank r of four has gradients r + 1. Pairs add them up, and two replicas of a shard add up the sums of
// pairs.
TEST(Exchange, AddsUpGradientsInTheGroupAndOverReplicas) {
  run_thread_ranks(4, [](int number, const CommunicatorFactory& factory) {
    const std::unique_ptr<Communicator> all = factory({});
    const std::unique_ptr<Communicator> pair = all->split(number / 2, number);
    const std::unique_ptr<Communicator> copies = all->split(number % 2, number);
    const std::vector<std::int64_t> one_tensor{1009};
    for (const bool blocks : {false, true}) {
      RankState rank(in_blocks(2, blocks), *all, detail::posix_file_system(), {},
                     [&](detail::StateLayout& layout) {
                       detail::FlatBuffer& flat = layout.units[1].buffers[0];
                       flat = detail::FlatBuffer(flat.name, true, pair.get(), copies.get(),
                                                 detail::FlatLayout(one_tensor, 2, 2), flat.tensors);
                     });
      detail::FlatBuffer& flat = rank.store.units()[1].buffers[0];
      const Shape whole{flat.layout.padded_elements()};
      const auto memory = [&](std::int64_t bytes) {
        return Buffer(rank.memory, bytes, Category::other, "test");
      };
      const Buffer values = memory(whole.elements() * 4), sum = memory(flat.layout.shard_elements() * 4);
      std::fill_n(static_cast<float*>(values.data()), whole.elements(), static_cast<float>(number + 1));
      rank.arena.begin("train", false);
      for (const bool in_group : {true, false}) {
        GradientExchange& exchange = in_group ? flat.gradients_over->in_group() : *flat.gradients_over;
        const GradientExchange::Bytes bytes = exchange.bytes(flat, DataType::float32);
        const Buffer sent = memory(bytes.sent), received = memory(bytes.received);
        const TensorView gradients{values.data(), DataType::float32, whole};
        const ConstTensorView travels =
            bytes.sent > 0 ? exchange.round(rank.compute, flat, gradients, sent.data()) : gradients;
        const std::int64_t elements = (in_group ? flat.shard() : flat.owned()).size();
        exchange.reduce(flat, travels, received.data(), {sum.data(), DataType::float32, Shape{elements}},
                        {.group_size = 2, .last = false}, {rank.compute.record()}, exchange_label);
        flat.reduce_done.wait();
        const float expected = !in_group ? 10.0f : number < 2 ? 3.0f : 7.0f;
        for (std::int64_t i = 0; i < elements; ++i) {
          ASSERT_NEAR(static_cast<const float*>(sum.data())[i], expected, 1e-5f) << i;
        }
      }
      rank.arena.end();
      all->barrier(exchange_label).wait();
    }
  });
}

TEST(Exchange, GathersWeightsAndRoundsThemForTrainingAlone) {
  run_thread_ranks(2, [](int number, const CommunicatorFactory& factory) {
    const std::unique_ptr<Communicator> group = factory({});
    for (const bool blocks : {false, true}) {
      RankState rank(in_blocks(3, blocks), *group);
      detail::FlatBuffer& flat = rank.store.units()[1].buffers[0];
      const std::int64_t elements = flat.layout.padded_elements();
      const Buffer memory(rank.memory, elements * 4, Category::other, "test");
      auto* const values = static_cast<float*>(memory.data());
      const TensorView whole{values, DataType::float32, Shape{elements}};
      const auto value_of = [](std::int64_t i) { return static_cast<float>(i % 200) / 199; };
      for (const bool training : {false, true}) {
        for (const bool alone : {false, true}) {
          const detail::ElementRange own = alone ? detail::ElementRange{0, elements} : flat.shard();
          std::fill_n(values, elements, -1.0f);
          for (std::int64_t i = own.begin; i < own.end; ++i) values[i] = value_of(i);
          const std::uint64_t before = group->sequence_hash();
          flat.weights->gather(flat, part_of(whole, 0, own), whole, {}, training, exchange_label);
          flat.gather_done.wait();
          EXPECT_EQ(group->sequence_hash() == before, alone) << "nothing is sent where a rank has all";
          float furthest = 0;
          for (std::int64_t i = 0; i < elements; ++i) {
            furthest = std::max(furthest, std::abs(values[i] - value_of(i)));
          }
          EXPECT_EQ(furthest > 0, blocks && training) << number;
          EXPECT_LE(furthest, 1.0f / 254 + 1e-6f);
        }
      }
      group->barrier(exchange_label).wait();
    }
  });
}

}  // namespace
}  // namespace tranche::test
