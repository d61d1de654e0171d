// Each setting of the configuration that a LibTorch module supports, with the bits of stage 0 if they must be
// equal.

#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "rank.h"

namespace tranche::test {
namespace {

TEST(LibTorchSettings, EveryOptimizerHasTheSameBitsAtEveryStageAndTier) {
  const std::string host = R"(, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"})";
  for (const char* rule : {"AdamW", "Adam", "Adagrad", "LARS", "Lamb", "Lion", "RMSprop", "SGD"}) {
    const std::string optimizer = "\"" + std::string(rule) + R"(", "params": {"lr": 0.002})";
    const std::string first = digest_after<Gpt>({.stage = 0, .optimizer = optimizer}, 3, 0.1);
    EXPECT_EQ(digest_after<Gpt>({.stage = 2, .optimizer = optimizer}, 3, 0.1), first) << rule;
    EXPECT_EQ(
        digest_after<Gpt>({.stage = 3, .recompute = true, .optimizer = optimizer, .zero = host}, 3, 0.1),
        first)
        << rule;
  }
}

/// AdamW updates the tied embedding, norms and biases; a fused weight counts as three matrices.
TEST(LibTorchSettings, MuonTakesTheMatricesThatAreNamed) {
  const std::string host = R"(, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"})";
  Trial run{.optimizer = R"("Muon", "params": {"lr": 0.002})",
            .matrices = {{"layers.*.mix.weight", 3}, {"layers.*"}}};
  const std::string first = digest_after<Gpt>(run, 3, 0.1);
  run.stage = 2;
  EXPECT_EQ(digest_after<Gpt>(run, 3, 0.1), first);
  run.stage = 3;
  run.recompute = true;
  EXPECT_EQ(digest_after<Gpt>(run, 3, 0.1), first);
  run.zero = host;
  EXPECT_EQ(digest_after<Gpt>(run, 3, 0.1), first);
  run.matrices = {{"layers.*"}};  // the fused weight counts as one
  EXPECT_NE(digest_after<Gpt>(run, 3, 0.1), first);

  Rank<Gpt> rank(run, all_ranks(), world().size(), seeded<Gpt>());
  EXPECT_EQ(rank.trainer.engine().read_optimizer_state("layers.1.up.weight", "momentum_buffer").size(),
            static_cast<std::size_t>(48 * 24));
  EXPECT_EQ(rank.trainer.engine().read_optimizer_state("token.weight", "exp_avg").size(),
            static_cast<std::size_t>(53 * 24));
}

TEST(LibTorchSettings, WhatTheConfigurationFreezesIsAsIfTheModuleHadFrozenIt) {
  for (const Trial& run : {Trial{.stage = 0}, Trial{.stage = 3}, Trial{.stage = 3, .recompute = true}}) {
    const auto digest = [&](bool by_module) {
      Trial mine = run;
      if (!by_module) mine.tranche = R"(, "frozen": ["layers.1.*", "norm.bias"])";
      Gpt net = seeded<Gpt>(0.1);
      for (auto& item : net->named_parameters()) {
        const bool frozen = item.key().rfind("layers.1.", 0) == 0 || item.key() == "norm.bias";
        if (by_module && frozen) item.value().set_requires_grad(false);
      }
      Rank<Gpt> rank(mine, all_ranks(), world().size(), net);
      EXPECT_FALSE(net->layers[1]->up->weight.requires_grad());
      EXPECT_TRUE(net->layers[0]->up->weight.requires_grad());
      torch::manual_seed(100 + static_cast<std::uint64_t>(world().rank()));
      for (int step = 0; step < 3; ++step) rank.step(step);
      return text_of(rank.trainer.engine().state_digest());
    };
    EXPECT_EQ(digest(false), digest(true)) << run.json();
  }
}

/// Each of these keys changes neither a rank's part of a module nor any bit compared with the same run at
/// stage 0.
TEST(LibTorchSettings, OtherKeysHaveTheBitsOfStage0) {
  struct Keys {
    std::string top = {}, zero_of_both = {}, zero = {}, tranche_of_both = {}, tranche = {};
  };
  const std::vector<Keys> all{
      {.zero = R"(, "overlap_comm": false, "stage3_param_persistence_threshold": 600)"},
      {.zero = R"(, "reduce_bucket_size": 500, "stage3_prefetch_bucket_size": 500)"},
      {.zero = R"(, "offload_optimizer": {"device": "cpu", "ratio": 0.5})"},
      {.tranche = R"(, "collectives": "messages")"},
      {.top = R"(, "communication_data_type": "bf16")"},
      {.top = R"(, "data_types": {"grad_accum_dtype": "bf16"})"},
      {.tranche_of_both =
           R"(, "parameter_groups": [{"pattern": "layers.0.*", "learning_rate": 0.003}, {"pattern": "*.bias", "weight_decay": 0.1}])"},
      {.top =
           R"(, "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 8, "warmup_num_steps": 2}})"},
  };
  for (const Keys& keys : all) {
    Trial run{.stage = 0, .zero = keys.zero_of_both, .tranche = keys.tranche_of_both, .top = keys.top};
    const std::string first = digest_after<Gpt>(run, 3, 0.1);
    run.zero += keys.zero;
    run.tranche += keys.tranche;
    for (const int stage : {2, 3}) {
      run.stage = stage;
      run.recompute = stage == 3;
      EXPECT_EQ(digest_after<Gpt>(run, 3, 0.1), first) << run.json();
    }
  }
}

TEST(LibTorchSettings, ABatchThatChangesBetweenStepsHasTheBitsOfStage0) {
  const auto digest = [](const Trial& run) {
    Rank<Gpt> rank(run, all_ranks(), world().size(), seeded<Gpt>());
    rank.step(0);
    rank.trainer.engine().set_batch(2, 3);
    int calls = 0;
    for (int step = 1; step < 3; ++step) {
      rank.trainer.step([&](int m) {
        ++calls;
        return loss_of(rank.net, 100 + 2 * ((step * 3 + m) * rank.runtime.size() + rank.runtime.rank()), 2);
      });
    }
    EXPECT_EQ(calls, 6);
    return text_of(rank.trainer.engine().state_digest());
  };
  const std::string first = digest({.stage = 0});
  EXPECT_EQ(digest({.stage = 2, .recompute = true}), first);
  EXPECT_EQ(digest({.stage = 3}), first);
}

TEST(LibTorchSettings, StateOnDiskHasTheSameBits) {
  const std::string disk =
      R"({"device": "nvme", "nvme_path": ")" + std::filesystem::temp_directory_path().string() + "\"}";
  const std::string first = digest_after<Gpt>({.stage = 0}, 3, 0.1);
  EXPECT_EQ(digest_after<Gpt>({.stage = 1, .zero = ", \"offload_optimizer\": " + disk}, 3, 0.1), first);
  for (const bool recompute : {false, true}) {
    EXPECT_EQ(digest_after<Gpt>({.stage = 3,
                                 .recompute = recompute,
                                 .zero = ", \"offload_optimizer\": " + disk + ", \"offload_param\": " + disk},
                                3, 0.1),
              first);
  }
}

TEST(LibTorchSettings, ClippingAndFp16HaveTheSameBits) {
  for (const char* precision : {"", "bf16", "fp16"}) {
    const auto at = [&](int stage, bool recompute) {
      return digest_after<Gpt>(
          {.stage = stage, .recompute = recompute, .precision = precision, .clipping = 0.05}, 4, 0.1);
    };
    const std::string first = at(0, false);
    EXPECT_EQ(at(1, true), first) << precision;
    EXPECT_EQ(at(2, false), first) << precision;
    EXPECT_EQ(at(3, true), first) << precision;
  }
}

/// At every stage a step in which one rank's gradient is not finite changes nothing and halves the scale.
TEST(LibTorchSettings, LossScalingSkipsAStepThatOverflows) {
  for (const int stage : {0, 3}) {
    Rank<Gpt> rank({.stage = stage, .recompute = stage == 3, .precision = "fp16"}, all_ranks(),
                   world().size(), seeded<Gpt>());
    double scale = 0;
    for (int step = 0; step < 4; ++step) scale = rank.step(step).loss_scale;  // past the first overflows
    ASSERT_TRUE(rank.step(4).applied);
    const std::string before = text_of(rank.trainer.engine().state_digest());
    for (int overflow = 0; overflow < 2; ++overflow) {  // the default patience allows one of them
      const StepResult skipped = rank.trainer.step([&](int m) {
        lt::Loss loss = loss_of(rank.net, 2 * rank.runtime.rank(), 2);
        if (m == 1 && rank.runtime.rank() == rank.runtime.size() - 1)
          loss.sum = loss.sum * std::numeric_limits<float>::infinity();
        return loss;
      });
      EXPECT_FALSE(skipped.applied);
      EXPECT_FALSE(skipped.skipped_because.empty());
    }
    EXPECT_EQ(text_of(rank.trainer.engine().weights_digest()).empty(), false);
    EXPECT_EQ(text_of(rank.trainer.engine().state_digest()), before) << "stage " << stage;
    const StepResult after = rank.step(5);
    EXPECT_TRUE(after.applied);
    EXPECT_LT(after.loss_scale, scale);
  }
}

TEST(LibTorchSettings, CopiesOfAShardedModelHaveTheBitsOfOneGroup) {
  if (world().size() % 2 != 0) GTEST_SKIP() << "an odd number of ranks";
  // Replicas first add within their ranks, and so does this group.
  const std::string group = R"(, "reduction_group": )" + std::to_string(world().size() / 2);
  const std::string one = digest_after<Gpt>({.stage = 3, .tranche = group}, 3, 0.1);
  for (const char* replicate : {"all", "parameters"}) {
    for (const bool recompute : {false, true}) {
      EXPECT_EQ(digest_after<Gpt>({.stage = 3,
                                   .recompute = recompute,
                                   .tranche = R"(, "mesh": "replicate=2, shard=*", "replicate": ")" +
                                              std::string(replicate) + "\""},
                                  3, 0.1),
                one)
          << replicate;
    }
  }
}

struct CountingImpl : torch::nn::Module {
  static inline int calls = 0;
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(4, 4))};
  at::Tensor forward(const at::Tensor& x) {
    ++calls;
    return torch::tanh(linear(x));
  }
};
TORCH_MODULE(Counting);

/// Trains a list of units for a step; returns the number of their forward runs.
int calls_of_a_step(bool configured, std::vector<std::string> named) {
  struct NetImpl : torch::nn::Module {
    lt::Units<Counting> list{this, "list", 3};
    lt::Unit<Counting> last{this, "last"};
  };
  const Trial run{
      .stage = 3,
      .tranche = std::string(R"(, "activation_checkpointing": )") + (configured ? "true" : "false"),
      .accumulation = 1};
  const Config config = parse_config(run.json(), world().size());
  Runtime runtime(RuntimeOptions::from(config), all_ranks());
  torch::manual_seed(1);
  NetImpl net;
  lt::Trainer trainer(runtime, net, {.recompute = std::move(named), .config = config});
  Counting::Impl::calls = 0;
  trainer.step([&](int) { return lt::Loss{net.last(net.list(torch::ones({2, 4}))).sum(), 2}; });
  return Counting::Impl::calls;
}

TEST(LibTorchSettings, UnitsAreRecomputedThatAreNamedOrListed) {
  EXPECT_EQ(calls_of_a_step(false, {}), 4);
  EXPECT_EQ(calls_of_a_step(true, {}), 7) << "those of Units<>";
  EXPECT_EQ(calls_of_a_step(false, {"list.1", "last"}), 6);
  EXPECT_EQ(calls_of_a_step(true, {"*"}), 8);
}

/// Ranks use different samples, so their running means differ unless rank 0's are used.
TEST(LibTorchSettings, BuffersAreOfARankOrRank0s) {
  const Trial run{.stage = 3};
  const Config config = parse_config(run.json(), world().size());
  for (const bool broadcast : {false, true}) {
    Runtime runtime(RuntimeOptions::from(config), all_ranks());
    Convolutions net = seeded<Convolutions>();
    lt::Trainer trainer(runtime, *net, {.broadcast_buffers = broadcast, .config = config});
    for (int step = 0; step < 3; ++step) {
      trainer.step(
          [&](int m) { return loss_of(net, first_sample(step, m, run, runtime.rank(), runtime.size()), 2); });
    }
    std::vector<double> seen(static_cast<std::size_t>(runtime.size()));
    trainer.evaluate(1, [&](int) {
      const double mine = net->first->norm->running_mean.sum().item<double>();
      world()
          .all_gather(&mine, seen.data(), 8, DataType::uint8, 0, {}, {"mean", "test", Traffic::control})
          .wait();
      return loss_of(net, 2 * runtime.rank(), 2);
    });
    EXPECT_EQ(net->first->norm->num_batches_tracked.item<std::int64_t>(), 6);
    for (std::size_t rank = 1; rank < seen.size(); ++rank) {
      if (broadcast) {
        EXPECT_EQ(seen[rank], seen[0]);
      } else {
        EXPECT_NE(seen[rank], seen[0]);
      }
    }
  }
}

}  // namespace
}  // namespace tranche::test
