// The adapter's laws under mpirun: equal bits at every stage, exact traffic and memory.

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "rank.h"

namespace tranche::test {
namespace {

std::vector<Trial> ways(const std::string& precision = {}) {
  const std::string host = R"(, "offload_optimizer": {"device": "cpu"})";
  const std::string all_on_host = host + R"(, "offload_param": {"device": "cpu"})";
  std::vector<Trial> runs{{.stage = 0},
                          {.stage = 0, .recompute = true},
                          {.stage = 1},
                          {.stage = 1, .recompute = true},
                          {.stage = 2},
                          {.stage = 2, .recompute = true},
                          {.stage = 2, .zero = host},
                          {.stage = 3},
                          {.stage = 3, .recompute = true},
                          {.stage = 3, .depth = 1},
                          {.stage = 3, .recompute = true, .depth = 1},
                          {.stage = 3, .depth = 4},
                          {.stage = 3, .zero = all_on_host},
                          {.stage = 3, .recompute = true, .zero = all_on_host},
                          {.stage = 3, .tranche = R"(, "gather_for": "step")"}};
  for (Trial& run : runs) run.precision = precision;
  return runs;
}

template <class Net>
void expect_the_same_bits(const std::string& precision, double dropout) {
  std::string first;
  for (const Trial& run : ways(precision)) {
    const std::string digest = digest_after<Net>(run, 4, dropout);
    if (first.empty()) first = digest;
    EXPECT_EQ(digest, first) << run.json() << (run.recompute ? " recomputed" : "");
  }
}

TEST(LibTorchLaws, ATransformerHasTheSameBitsAtEveryStage) {
  expect_the_same_bits<Gpt>("", 0.1);
}
TEST(LibTorchLaws, AlsoInBf16) {
  expect_the_same_bits<Gpt>("bf16", 0.1);
}
TEST(LibTorchLaws, AlsoWithGradientsThatAreReducedOnceAStep) {
  std::string first;
  for (Trial run : ways()) {
    run.reduction = "boundary";
    const std::string digest = digest_after<Gpt>(run, 3, 0.1);
    if (first.empty()) first = digest;
    EXPECT_EQ(digest, first) << run.json() << (run.recompute ? " recomputed" : "");
  }
}
TEST(LibTorchLaws, ConvolutionsHaveThem) {
  // With recomputation batch norm would count its samples twice (docs/guides/libtorch.md).
  std::string first;
  for (const Trial& run : ways()) {
    if (run.recompute) continue;
    const std::string digest = digest_after<Convolutions>(run, 4, 0);
    if (first.empty()) first = digest;
    EXPECT_EQ(digest, first) << run.json();
  }
}
TEST(LibTorchLaws, ANetworkThatChoosesHasThem) {
  expect_the_same_bits<Choosing>("", 0);
}

TEST(LibTorchLaws, UnitsInsideUnitsHaveThem) {
  std::string first;
  for (Trial run : ways()) {
    run.depth += 1;
    const std::string digest = digest_after<Nested>(run, 4, 0);
    if (first.empty()) first = digest;
    EXPECT_EQ(digest, first) << run.json() << (run.recompute ? " recomputed" : "");
  }
  const Trial outer_alone{.stage = 3, .depth = 3};
  EXPECT_EQ(digest_after<Nested>(outer_alone, 4, 0, {"outers.0", "outers.1"}), first);
}

TEST(LibTorchBytes, ElementsSentAndStateAreTheFormulas) {
  for (const Trial& run : {Trial{.stage = 0}, Trial{.stage = 1}, Trial{.stage = 2}, Trial{.stage = 3},
                           Trial{.stage = 3, .recompute = true}}) {
    Rank<Gpt> rank(run, all_ranks(), world().size(), seeded<Gpt>());
    for (int step = 0; step < 3; ++step) rank.step(step);
    Engine& engine = rank.trainer.engine();
    const auto report = nlohmann::json::parse(engine.traffic_report());
    for (const auto& axis : report["by_axis"]) {
      EXPECT_EQ(axis["elements"], axis["formula_elements"]) << run.json();
      if (run.stage == 3 && world().size() > 1) {
        // The embedding is gathered four times, each other unit twice, and each is reduced once, in each of
        // two micro-batches.
        std::int64_t elements = 0;
        for (const UnitSpec& unit : engine.model().units()) {
          std::int64_t padded = 0;
          for (const TensorSpec& tensor : unit.tensors) padded += (tensor.shape.elements() + 63) / 64 * 64;
          const std::int64_t shard = (padded + world().size() * 256 - 1) / (world().size() * 256) * 256;
          elements += 2 * shard * (world().size() - 1) * (unit.name == "token" ? 5 : 3);
        }
        EXPECT_EQ(axis["elements"], elements) << run.json();
      }
    }
    const StateBytes bytes = engine.state_bytes();
    const CategoryBytes held = rank.runtime.ledger().account(Tier::device).persistent;
    EXPECT_EQ(held[Category::parameters], bytes.parameters) << run.json();
    EXPECT_EQ(held[Category::gradients], bytes.gradients) << run.json();
    EXPECT_EQ(held[Category::optimizer], bytes.optimizer) << run.json();
    // fp32 AdamW with several micro-batches: the table in design.md, without padding.
    const std::int64_t p = 4 * engine.model().parameters(), n = world().size();
    const std::int64_t wanted = run.stage == 0 ? 4 * p : run.stage < 3 ? 1 * p + 3 * p / n : 4 * p / n;
    EXPECT_NEAR(double(bytes.parameters + bytes.gradients + bytes.optimizer - bytes.padding), double(wanted),
                run.stage == 0 ? 0 : 16 * 4096);
  }
}

}  // namespace
}  // namespace tranche::test
