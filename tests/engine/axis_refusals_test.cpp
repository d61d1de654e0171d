// Meshes, layouts and settings that the axes `tensor` and `context` cannot be used with, and what the refusal
// says.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>

#include "cut_model.h"
#include "tests/core/error_text.h"
#include "tranche/core/error.h"

namespace tranche::test {
namespace {

using ::testing::HasSubstr;

TEST(ContextAxis, RefusesWhatItsRanksCannotShare) {
  const auto text_of = [](const CutRun& run, const std::function<void(Config&)>& adjust,
                          const ModelSpec& model = cut_model()) {
    return message_of<ConfigurationError>([&] {
      on_cut_ranks(
          run, [](Engine&, Runtime&) {}, adjust, model);
    });
  };
  ModelSpec without = cut_model();
  without.sequence_parts = false;
  EXPECT_THAT(text_of({2, "context=2"}, {}, without),
              HasSubstr("tranche.mesh \"context=2\": the model computes no parts of sequences "
                        "(ModelSpec::sequence_parts), so all 2 ranks of context would compute the same; "
                        "leave context out"));
  EXPECT_THAT(
      text_of({5, "context=5"}, {}),
      HasSubstr("tranche.mesh \"context=5\": samples of 8 tokens cannot be cut into the 10 parts that "
                "5 ranks of context share; use sequences of at least 10 tokens, or a smaller "
                "context"));
  const auto ulysses = [](Config& c) { c.context_exchange = ContextExchange::ulysses; };
  ModelSpec six_heads;
  six_heads.sequence_parts = true;
  six_heads.tokens_per_sample = 24;
  six_heads.tensor_dimensions = {"heads"};
  six_heads.add_unit(
      {"u", {{.name = "qkv", .shape = {36}, .initializer = {}, .dimensions = {{"heads", 3, 2}}}}, 1});
  EXPECT_THAT(
      text_of({4, "context=4"}, ulysses, six_heads),
      HasSubstr("tranche.context_exchange ulysses with context=4: 6 heads cannot be shared by 4 ranks; "
                "use gather, or a context of 2, 3 or 6"));
  EXPECT_THAT(
      text_of({4, "context=2, tensor=2"}, ulysses, six_heads),
      HasSubstr("tranche.context_exchange ulysses with context=2: 3 heads of a rank of tensor cannot be "
                "shared by 2 ranks; use gather, or a context of 3"));
  EXPECT_THAT(text_of({4, "context=4"}, ulysses),
              HasSubstr("tranche.context_exchange ulysses with context=4: 2 key and value heads cannot be "
                        "shared by 4 ranks; use gather, or a context of 2"));
  EXPECT_THAT(text_of({4, "context=2, tensor=2"}, ulysses),
              HasSubstr("1 key and value head of a rank of tensor cannot be shared by 2 ranks; use gather"));
  EXPECT_EQ(text_of({2, "context=2"}, ulysses), nothing_thrown);
  const auto refused = [&](const std::function<void(Config&)>& adjust, const char* text) {
    EXPECT_THAT(text_of({2, "context=2"}, adjust), HasSubstr(text));
  };
  refused(
      [](Config& c) {
        c.world_size_invariant = true;
        c.accumulation_steps = 0;
      },
      "tranche.world_size_invariant: tranche.mesh \"context=2\" with context=2 cannot be used with it: a "
      "sample's gradient is the sum over the ranks of context, which rounds differently on another number of "
      "them; leave one of the two out");
  refused([](Config& c) { c.gradient_noise_scale = true; },
          "tranche.gradient_noise_scale: tranche.mesh \"context=2\" with context=2 cannot be used with it: "
          "each rank of context has only part of each sample's gradient; turn the noise scale off");
  EXPECT_THAT(text_of({4, "context=2, tensor=2"}, [](Config& c) { c.tensor_sums = TensorSums::chain; }),
              HasSubstr("tranche.tensor_sums: tranche.mesh \"context=2, tensor=2\" with context=2 cannot be "
                        "used with it: chain promises the bits of one rank, but sums over parts of sequences "
                        "round differently; write rank_order"));
  EXPECT_THAT(text_of({4, "replicate=2, context=2"}, [](Config& c) { c.reduction_group = 1; }),
              HasSubstr("tranche.reduction_group: 1 with tranche.mesh \"replicate=2, context=2\", where "
                        "gradients are added within the 2 ranks of shard and context first; leave it out"));
}

TEST(TensorAxis, RefusesWhatItCannotCut) {
  const auto text_of = [](const CutRun& run, const std::function<void(Config&)>& adjust = {},
                          const ModelSpec& model = cut_model()) {
    return message_of<ConfigurationError>([&] {
      on_cut_ranks(
          run, [](Engine&, Runtime&) {}, adjust, model);
    });
  };
  EXPECT_THAT(
      text_of({3, "tensor=3"}, [](Config&) {}),
      HasSubstr("tranche.mesh \"tensor=3\": the model has 4 heads, which 3 ranks cannot share; tensor can "
                "be 1, 2 or 4"));
  ModelSpec named = cut_model();
  named.name = "GPT2LMHeadModel";
  EXPECT_THAT(
      text_of({8, "tensor=8"}, {}, named),
      HasSubstr("tranche.mesh \"tensor=8\": GPT2LMHeadModel has 4 heads, which 8 ranks cannot share"));
  ModelSpec without = cut_model();
  without.tensor_dimensions.clear();
  EXPECT_THAT(
      text_of({2, "tensor=2"}, {}, without),
      HasSubstr("the model names no dimension that the axis tensor can cut (ModelSpec::tensor_dimensions), "
                "so all 2 ranks would compute the same; leave tensor out"));
  ModelSpec twice = cut_model();
  twice.tensor_dimensions.emplace_back("width");
  EXPECT_THAT(text_of({2, "tensor=2"}, {}, twice),
              HasSubstr("tensor wte has two dimensions that the axis tensor cuts, vocabulary and width; it "
                        "can cut only one of them"));
  const auto with_layout = [&](std::map<std::string, std::string> layout, int ranks = 2,
                               const ModelSpec& model = cut_model()) {
    return text_of(
        {ranks, ranks == 1 ? "" : "tensor=" + std::to_string(ranks)}, [&](Config& c) { c.layout = layout; },
        model);
  };
  for (const int ranks : {1, 2}) {
    EXPECT_THAT(
        with_layout({{"vocab", "whole"}}, ranks),
        HasSubstr("tranche.layout: the model has no dimension 'vocab'; its dimensions are: vocabulary, "
                  "width, heads, key_value_heads and inner"));
  }
  EXPECT_THAT(with_layout({{"heads", "whole"}}),
              HasSubstr("tranche.layout: the model cannot compute with heads whole on every rank of tensor; "
                        "dimensions that can be whole are: inner and vocabulary"));
  EXPECT_THAT(with_layout({{"width", "tensor"}}),
              HasSubstr("tensor wte has two dimensions that the axis tensor cuts, vocabulary and width"));
  ModelSpec unused;
  unused.tensor_dimensions = unused.whole_dimensions = {"inner"};
  unused.add_unit({"u",
                   {{.name = "w", .shape = {4}, .initializer = {}, .dimensions = {{"inner"}}},
                    {.name = "v", .shape = {4}, .initializer = {}, .dimensions = {{"width"}}}},
                   1});
  EXPECT_THAT(with_layout({{"width", "tensor"}}, 2, unused),
              HasSubstr("tranche.layout: the model computes no parts of width; dimensions that the axis "
                        "tensor can cut are: inner"));
  EXPECT_THAT(
      with_layout({{"inner", "whole"}}, 2, unused),
      HasSubstr(
          "tranche.mesh \"tensor=2\": tranche.layout leaves whole all dimensions of the model that the axis "
          "tensor can cut, so all 2 ranks would compute the same; leave one of inner out of the layout"));
  EXPECT_THAT(text_of({4, "pipeline=2, tensor=2"}, [](Config& c) { c.layout["vocabulary"] = "whole"; }),
              HasSubstr("tranche.mesh \"pipeline=2, tensor=2\": tensor wte is shared by two stages of a "
                        "pipeline, which the axis tensor does not support yet"));
  ModelSpec shared;
  shared.tensor_dimensions = {"heads", "key_value_heads"};
  shared.add_unit({"u",
                   {{.name = "q", .shape = {12}, .initializer = {}, .dimensions = {{"heads"}}},
                    {.name = "k", .shape = {3}, .initializer = {}, .dimensions = {{"key_value_heads"}}}},
                   1});
  EXPECT_THAT(
      text_of({2, "tensor=2"}, {}, shared),
      HasSubstr("the model has 3 key and value heads, which 2 ranks cannot share; tensor can be 1, 3, 6 or "
                "12"));
  ModelSpec narrow;
  narrow.tensor_dimensions = {"inner"};
  narrow.add_unit({"u", {{.name = "w", .shape = {3}, .initializer = {}, .dimensions = {{"inner"}}}}, 1});
  EXPECT_THAT(
      text_of({4, "tensor=4"}, {}, narrow),
      HasSubstr("the model has a dimension inner of 3, which 4 ranks cannot share; tensor can be 1, 2 or 3"));

  const auto with = [&](const std::function<void(Config&)>& adjust) {
    return text_of({2, "tensor=2"}, adjust);
  };
  // Ranks of tensor have the same samples, so one data rank has as many gradients as one rank.
  EXPECT_THAT(
      with([](Config& c) {
        c.gradient_noise_scale = true;
        c.reduction = ReductionPolicy::boundary;
      }),
      HasSubstr("tranche.gradient_noise_scale: needs at least two gradients a step, but one rank adds "
                "its 4 micro-batches up before they are reduced; write tranche.reduction "
                "micro_batch"));
  EXPECT_THAT(text_of({4, "pipeline=2, tensor=2"}, [](Config& c) { c.gradient_noise_scale = true; }),
              HasSubstr("tranche.gradient_noise_scale: not with tranche.mesh \"pipeline=2, tensor=2\": "
                        "each stage has only part of each gradient; turn the noise scale off"));
  EXPECT_THAT(with([](Config& c) { c.tensor_sums = TensorSums::chain; }),
              HasSubstr("tranche.tensor_sums: chain: the model does not compute in chains "
                        "(ModelSpec::chain_sums); write rank_order"));
  ModelSpec columns;
  columns.tensor_dimensions = {"inner"};
  columns.add_unit(
      {"u", {{.name = "w", .shape = {64, 160}, .initializer = {}, .dimensions = {{"width"}, {"inner"}}}}, 1});
  EXPECT_THAT(
      text_of(
          {2, "tensor=2"}, [](Config& c) { c.precision.moments = DataType::block8; }, columns),
      HasSubstr("tranche.moments: with tranche.mesh \"tensor=2\" a rank has elements 0 to 79 of tensor w, "
                "which are not whole blocks of 256; keep the moments in fp32, or leave tensor out"));
  ModelSpec tied;
  tied.tensor_dimensions = {"inner"};
  tied.residual_width = 4;
  tied.add_unit({"ends",
                 {{.name = "ends.w",
                   .shape = {4, 4},
                   .initializer = {},
                   .matrices = 1,
                   .dimensions = {{"inner"}, {"width"}}}},
                 2});
  tied.add_unit({"middle", {{.name = "middle.w", .shape = {4, 4}, .initializer = {}, .matrices = 1}}, 1});
  tied.forward = {{{0}, 0, 1}, {{1}, 0, 1}, {{0}, 1, 1}};
  EXPECT_THAT(text_of(
                  {6, "pipeline=3, tensor=2"},
                  [](Config& c) {
                    c.optimizer.type = "Muon";
                    c.pipeline_cuts = PipelineCuts::equal;
                  },
                  tied),
              HasSubstr("tranche.mesh \"pipeline=3, tensor=2\": the axis tensor cuts, and stages of the "
                        "pipeline share, tensor ends.w, which its optimizer updates as a whole matrix; leave "
                        "out tensor or pipeline, or choose another optimizer for it"));
}

}  // namespace
}  // namespace tranche::test
