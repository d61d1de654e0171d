// Formats in which states, gradients and weights are stored and sent, and equal results for every number of
// ranks.

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "rank.h"

namespace tranche::test {
namespace {

const std::string state_on_host = R"(, "offload_optimizer": {"device": "cpu"})";
const std::string all_state_on_host = state_on_host + R"(, "offload_param": {"device": "cpu"})";

/// A network whose hidden weights are large enough for states in blocks of 8 bits.
struct WideImpl : torch::nn::Module {
  explicit WideImpl(double = 0)
      : in(this, "in", 8, 96), layers(this, "layers", 2, 96, 96), out(this, "out", 96, 1) {}
  at::Tensor forward(const at::Tensor& x) { return out(torch::tanh(layers(torch::tanh(in(x))))); }
  lt::Unit<torch::nn::Linear> in;
  lt::Units<torch::nn::Linear> layers;
  lt::Unit<torch::nn::Linear> out;
};
TORCH_MODULE(Wide);

lt::Loss loss_of(Wide& model, std::int64_t first, std::int64_t count) {
  const at::Tensor at = torch::arange(count * 8).view({count, 8}) + first * 8;
  const at::Tensor x = torch::sin(at.to(torch::kFloat) * 0.53f);
  const at::Tensor wrong = (model->forward(x) - 0.2 * x.sum(1, true)).to(torch::kFloat);
  return {0.25 * (wrong * wrong).sum(), count};
}

/// Trains with each rule and moments in this format; returns AdamW's digest.
std::string expect_the_bits_of_stage_0(const std::string& moments) {
  std::string of_adamw;
  for (const char* optimizer :
       {R"("AdamW", "params": {"lr": 0.002})", R"("Lion", "params": {"lr": 0.0005})",
        R"("Lamb", "params": {"lr": 0.002})", R"("SGD", "params": {"lr": 0.01, "momentum": 0.9})"}) {
    Trial run;
    run.optimizer = optimizer;
    run.tranche = R"(, "moments": ")" + moments + "\"";
    const std::string first = digest_after<Wide>(run, 4, 0);
    if (of_adamw.empty()) of_adamw = first;
    run.stage = 1;
    run.zero = state_on_host;
    EXPECT_EQ(digest_after<Wide>(run, 4, 0), first) << run.json();
    run.stage = 3;
    run.recompute = true;
    run.zero = all_state_on_host;
    EXPECT_EQ(digest_after<Wide>(run, 4, 0), first) << run.json();
    run.zero = {};
    EXPECT_EQ(digest_after<Wide>(run, 4, 0), first) << run.json();
  }
  return of_adamw;
}

TEST(LibTorchFormats, MomentsOf8And16BitsHaveTheSameBitsAtEveryStageAndTier) {
  const std::string of_fp32 = expect_the_bits_of_stage_0("fp32");
  const std::string of_bf16 = expect_the_bits_of_stage_0("bf16");
  const std::string of_block8 = expect_the_bits_of_stage_0("block8");
  EXPECT_NE(of_bf16, of_fp32);
  EXPECT_NE(of_block8, of_fp32);
  EXPECT_NE(of_block8, of_bf16);
}

TEST(LibTorchFormats, MomentsOf8BitsAreLoadedAtAnotherStage) {
  const MpiFolder folder;
  const std::string block8 = R"(, "moments": "block8")";
  std::string saved, after;
  {
    Rank<Wide> rank({.stage = 3, .recompute = true, .zero = all_state_on_host, .tranche = block8},
                    all_ranks(), world().size(), seeded<Wide>());
    for (int step = 0; step < 3; ++step) rank.step(step);
    rank.trainer.save(folder.path(), {.wait = true});
    saved = text_of(rank.trainer.engine().state_digest());
    rank.step(3);
    after = text_of(rank.trainer.engine().state_digest());
  }
  Rank<Wide> rank({.stage = 1, .tranche = block8}, all_ranks(), world().size(), seeded<Wide>());
  rank.trainer.load(folder.path());
  EXPECT_EQ(text_of(rank.trainer.engine().state_digest()), saved);
  rank.step(3);
  EXPECT_EQ(text_of(rank.trainer.engine().state_digest()), after);
}

TEST(LibTorchFormats, MasterFormatsHaveTheSameBitsAtEveryStageAndTier) {
  std::vector<std::string> digests;
  for (const char* master : {"\"split\"", "\"none\"", "\"none\", \"stochastic_rounding\": true"}) {
    Trial run{.precision = "bf16", .tranche = std::string(", \"master\": ") + master};
    digests.push_back(digest_after<Gpt>(run, 3, 0.1));
    run.stage = 2;
    run.zero = state_on_host;
    EXPECT_EQ(digest_after<Gpt>(run, 3, 0.1), digests.back()) << run.json();
    run.stage = 3;
    run.recompute = true;
    run.zero = {};
    EXPECT_EQ(digest_after<Gpt>(run, 3, 0.1), digests.back()) << run.json();
    run.zero = all_state_on_host;
    EXPECT_EQ(digest_after<Gpt>(run, 3, 0.1), digests.back()) << run.json();
  }
  EXPECT_NE(digests[0], digests[1]);
  EXPECT_NE(digests[1], digests[2]);
}

TEST(LibTorchFormats, QuantizedGradientsAndWeightsHaveTheSameBitsAtEveryStage) {
  const std::string gradients = R"(, "zero_quantized_gradients": true)";
  const std::string weights = R"(, "zero_quantized_weights": true)";
  for (const char* precision : {"", "bf16"}) {
    const std::string plain = digest_after<Gpt>({.stage = 0, .precision = precision}, 3, 0.1);
    for (const std::string& keys : {gradients, weights, gradients + weights}) {
      const std::string first = digest_after<Gpt>({.stage = 0, .precision = precision, .zero = keys}, 3, 0.1);
      EXPECT_NE(first, plain) << keys;
      EXPECT_EQ(
          digest_after<Gpt>({.stage = 2, .recompute = true, .precision = precision, .zero = keys}, 3, 0.1),
          first)
          << keys << precision;
      EXPECT_EQ(digest_after<Gpt>({.stage = 3, .precision = precision, .zero = keys}, 3, 0.1), first)
          << keys << precision;
      EXPECT_EQ(digest_after<Gpt>(
                    {.stage = 3, .recompute = true, .precision = precision, .zero = keys + all_state_on_host},
                    3, 0.1),
                first)
          << keys << precision;
    }
  }
}

/// The losses of 4 steps and the state after them.
template <class Net>
std::string trained_by(std::unique_ptr<Communicator> group, int ranks, const Trial& run) {
  Rank<Net> rank(run, group_of(group), ranks, seeded<Net>());
  std::string text;
  for (int step = 0; step < 4; ++step) text += std::to_string(rank.step(step).loss) + " ";
  return text + text_of(rank.trainer.engine().state_digest());
}

/// Uses 7 micro-batches, which neither 2 nor 3 ranks can share evenly.
template <class Net>
void expect_one_result_for_every_number_of_ranks(Trial run) {
  run.invariant = 7;
  run.depth += 1;
  const std::string of_one = trained_by<Net>(world().split(world().rank(), 0), 1, run);
  for (int ranks = 2; ranks <= world().size(); ++ranks) {
    for (const int stage : {0, 2, 3}) {
      run.stage = stage;
      run.recompute = stage == 3;
      if (auto group = world().split(world().rank() < ranks ? 0 : -1, world().rank())) {
        EXPECT_EQ(trained_by<Net>(std::move(group), ranks, run), of_one) << ranks << " ranks " << run.json();
      }
    }
  }
}

TEST(LibTorchFormats, AWorldSizeInvariantRunHasOneResultForEveryNumberOfRanks) {
  expect_one_result_for_every_number_of_ranks<Gpt>({.clipping = 0.05});
  expect_one_result_for_every_number_of_ranks<Gpt>({.precision = "bf16"});
  expect_one_result_for_every_number_of_ranks<Choosing>({});  // ranks leave different parameters unused
  expect_one_result_for_every_number_of_ranks<Nested>({});
}

}  // namespace
}  // namespace tranche::test
