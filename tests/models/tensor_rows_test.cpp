#include "tranche/models/tensor_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "training_fixture.h"
#include "tranche/kernels/embedding.h"

namespace tranche::models {
namespace {

/// A pass of 5 rows of `width` elements on ranks of the axis `tensor`.
template <typename Body>
void on_parts(int ranks, const Body& body) {
  Config config = plain_config(1);
  if (ranks > 1) config.mesh = "tensor=" + std::to_string(ranks);
  GptConfig model = tiny_gpt();
  model.heads = 12;
  on_ranks(ranks, Gpt::spec(model, 5), config, [&](Engine& engine) {
    TokenData data(5, model.vocabulary, false);
    data.draw(0, 1);
    const InferenceScope scope(engine);
    const Gpt gpt(model);
    const Pass pass = gpt.pass_of(engine, data.batch(), false);
    body(pass);
  });
}

std::vector<float> numbers(const ConstTensorView& view) {
  const float* first = view.as<float>();
  return {first, first + view.elements()};
}

TEST(TensorRows, AreGatheredInOrderAndPaddingIsLeftOut) {
  for (const int ranks : {1, 2, 3, 4}) {
    on_parts(ranks, [&](const Pass& pass) {
      const std::int64_t local = pass.local_rows(), first = pass.tensor_rank() * local;
      EXPECT_EQ(local, divide_round_up(5, ranks));
      std::vector<float> mine(static_cast<std::size_t>(local * 2));
      for (std::size_t i = 0; i < mine.size(); ++i)
        mine[i] = static_cast<float>(2 * first) + static_cast<float>(i);
      const ConstTensorView view{mine.data(), DataType::float32, {local, 2}};
      GatheredRows rows(pass, "test", view);
      EXPECT_EQ(rows.view().shape, (Shape{5, 2}));
      EXPECT_THAT(numbers(rows.view()), ::testing::ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
      EXPECT_EQ(rows.view().data == view.data, ranks == 1) << "without the axis nothing is copied";
      EXPECT_EQ(rows.take().held(), ranks > 1);
    });
  }
}

TEST(TensorRows, PartialSumsAreAddedAndScattered) {
  for (const int ranks : {1, 2, 3, 4}) {
    on_parts(ranks, [&](const Pass& pass) {
      const std::int64_t local = pass.local_rows(), first = pass.tensor_rank() * local;
      std::vector<float> sum(static_cast<std::size_t>(local * 2), -1.0f);
      PartialRows partial(pass, {sum.data(), DataType::float32, {local, 2}});
      ASSERT_EQ(partial.view().shape, (Shape{5, 2}));
      for (std::int64_t i = 0; i < 10; ++i) {
        partial.view().as<float>()[i] = static_cast<float>(i * (pass.tensor_rank() + 1));
      }
      partial.scatter("test");
      const float factor = static_cast<float>(ranks * (ranks + 1)) / 2;
      for (std::int64_t i = 0; i < 2 * local; ++i) {
        const std::int64_t at = 2 * first + i;
        EXPECT_EQ(sum[static_cast<std::size_t>(i)], at < 10 ? factor * static_cast<float>(at) : 0.0f);
      }
    });
  }
}

TEST(TensorRows, APartOfADimensionIsTheEnginesAndNeighboursShareFewHeads) {
  on_parts(4, [&](const Pass& pass) {
    const std::int64_t rank = pass.tensor_rank();
    const std::int64_t first[] = {0, 15, 30, 45}, count[] = {15, 15, 15, 16};
    EXPECT_EQ(pass.part_of(61).first, first[rank]);
    EXPECT_EQ(pass.part_of(61).count, count[rank]);
    EXPECT_EQ(pass.first_token(), first[rank]);
    EXPECT_EQ(pass.part_of(2).first, rank / 2);
    EXPECT_EQ(pass.part_of(2).count, 1);
  });
  on_parts(1, [&](const Pass& pass) {
    EXPECT_EQ(pass.part_of(61).count, 61);
    EXPECT_EQ(pass.first_token(), kernels::whole_vocabulary);
  });
}

}  // namespace
}  // namespace tranche::models
