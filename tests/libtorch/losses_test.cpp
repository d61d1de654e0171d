// Compares the losses of 60 steps under a Trainer with those of plain LibTorch with its own optimizers.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "rank.h"

namespace tranche::test {
namespace {

/// The losses of 60 steps with torch's own optimizer in one process, which runs the micro-batches of all
/// ranks. With `zeros` a parameter without a gradient gets a zero one, as under a Trainer; torch's optimizers
/// would skip it.
template <class Net, class Optimizer, class Options>
std::vector<double> plain_losses(const Trial& run, Options options, bool zeros = false,
                                 void (*prepare)(Net&) = nullptr) {
  Net net = seeded<Net>();
  if (prepare != nullptr) prepare(net);
  std::vector<at::Tensor> trained;
  for (at::Tensor& p : net->parameters()) {
    if (p.requires_grad()) trained.push_back(p);
    if (p.requires_grad() && zeros) p.mutable_grad() = torch::zeros_like(p);
  }
  Optimizer optimizer(trained, options);
  std::vector<double> losses;
  for (int step = 0; step < 60; ++step) {
    optimizer.zero_grad(/*set_to_none=*/!zeros);
    std::vector<at::Tensor> sums;
    std::int64_t tokens = 0;
    for (int m = 0; m < run.accumulation; ++m) {
      for (int rank = 0; rank < world().size(); ++rank) {
        const lt::Loss loss = loss_of(net, first_sample(step, m, run, rank, world().size()), 2);
        sums.push_back(loss.sum);
        tokens += loss.tokens;
      }
    }
    const at::Tensor mean = torch::stack(sums).sum() / tokens;
    mean.backward();
    if (run.clipping > 0) torch::nn::utils::clip_grad_norm_(trained, run.clipping);
    optimizer.step();
    losses.push_back(mean.template item<double>());
  }
  return losses;
}

template <class Net>
void expect_losses_of(const Trial& run, const std::vector<double>& wanted, void (*prepare)(Net&) = nullptr) {
  Net net = seeded<Net>();
  if (prepare != nullptr) prepare(net);
  Rank<Net> rank(run, all_ranks(), world().size(), net);
  double worst = 0;
  for (int step = 0; step < 60; ++step) {
    worst = std::max(worst, std::abs(rank.step(step).loss - wanted[std::size_t(step)]));
  }
  EXPECT_LE(worst, 1e-6) << run.json();
  if (world().rank() == 0)
    std::printf("largest difference %.1e of 60 losses, the last %.7f\n", worst, wanted[59]);
}

const std::string everything_decays = R"(, "decay": ["*"])";  // as in torch; by default biases and norms do
                                                              // not decay here

/// Epsilon exceeds the rounding of gradients, which Adam would make as large as any other gradient.
Trial by_adamw() {
  return {.stage = 3,
          .optimizer = R"("AdamW", "params": {"lr": 0.0005, "weight_decay": 0.01, "eps": 1e-6})",
          .tranche = everything_decays,
          .accumulation = 1};
}
torch::optim::AdamWOptions torchs_adamw() {
  return torch::optim::AdamWOptions(0.0005).weight_decay(0.01).eps(1e-6);
}
Trial by_sgd() {
  return {.stage = 0,
          .optimizer = R"("SGD", "params": {"lr": 0.01, "momentum": 0.9})",
          .tranche = everything_decays,
          .accumulation = 1};
}
torch::optim::SGDOptions torchs_sgd() {
  return torch::optim::SGDOptions(0.01).momentum(0.9);
}

template <class Net>
void expect_plain_losses(bool zeros = false, int depth = 2) {
  Trial adamw = by_adamw(), sgd = by_sgd();
  adamw.depth = sgd.depth = depth;
  expect_losses_of<Net>(adamw, plain_losses<Net, torch::optim::AdamW>(adamw, torchs_adamw(), zeros));
  expect_losses_of<Net>(sgd, plain_losses<Net, torch::optim::SGD>(sgd, torchs_sgd(), zeros));
}

TEST(LibTorchLosses, OfATransformerAreThoseOfPlainLibTorch) {
  expect_plain_losses<Gpt>();
}
TEST(LibTorchLosses, OfConvolutionsAreThoseOfPlainLibTorch) {
  expect_plain_losses<Convolutions>();
}
TEST(LibTorchLosses, OfUnusedParametersAreThoseOfPlainLibTorch) {
  expect_plain_losses<Choosing>(/*zeros=*/true);
}
TEST(LibTorchLosses, OfUnitsInsideUnitsAreThoseOfPlainLibTorch) {
  expect_plain_losses<Nested>(false, /*depth=*/3);
}
TEST(LibTorchLosses, WithAccumulationAndClippingAreThoseOfPlainLibTorch) {
  Trial run = by_adamw();
  run.accumulation = 3;
  run.clipping = 0.05;  // less than every norm
  const std::vector<double> wanted = plain_losses<Gpt, torch::optim::AdamW>(run, torchs_adamw());
  for (const char* reduction : {"micro_batch", "boundary"}) {
    run.reduction = reduction;
    expect_losses_of<Gpt>(run, wanted);
  }
}
TEST(LibTorchLosses, WithFrozenUnitsAndParametersAreThoseOfPlainLibTorch) {
  const auto freeze = +[](Gpt& net) {
    for (at::Tensor& p : net->layers[0]->parameters()) p.set_requires_grad(false);
    net->layers[2]->up->weight.set_requires_grad(false);
    net->layers[1]->norm1->bias.set_requires_grad(false);
  };
  for (const bool recompute : {false, true}) {
    Trial run = by_adamw();
    run.recompute = recompute;
    expect_losses_of<Gpt>(run, plain_losses<Gpt, torch::optim::AdamW>(run, torchs_adamw(), false, freeze),
                          freeze);
  }
}

/// Batch norm over all ranks or, without a runtime, torch's own over the whole batch.
struct NormedImpl : torch::nn::Module {
  explicit NormedImpl(Runtime* runtime) {
    conv = std::make_unique<lt::Unit<torch::nn::Conv1d>>(this, "conv", torch::nn::Conv1dOptions(2, 4, 3));
    if (runtime != nullptr) {
      ours = std::make_unique<lt::Unit<lt::SynchronizedBatchNorm>>(this, "norm", *runtime, 4);
    } else {
      torchs = std::make_unique<lt::Unit<torch::nn::BatchNorm1d>>(this, "norm", 4);
    }
    head = std::make_unique<lt::Unit<torch::nn::Linear>>(this, "head", 4 * 5, 1);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = (*conv)(x);
    return (*head)(torch::tanh(ours ? (*ours)(y) : (*torchs)(y)).flatten(1));
  }
  lt::Loss loss(std::int64_t first, std::int64_t count) {
    const at::Tensor x =
        torch::sin((torch::arange(count * 14).view({count, 2, 7}) + first * 14).to(torch::kFloat) * 0.3f);
    // Losses stay near 1, where fp32 is more precise than the bound.
    const at::Tensor wrong = forward(x) - 0.2f * x.sum({1, 2}).unsqueeze(1);
    return {(wrong * wrong).sum(), count};
  }
  std::unique_ptr<lt::Unit<torch::nn::Conv1d>> conv;
  std::unique_ptr<lt::Unit<lt::SynchronizedBatchNorm>> ours;
  std::unique_ptr<lt::Unit<torch::nn::BatchNorm1d>> torchs;
  std::unique_ptr<lt::Unit<torch::nn::Linear>> head;
};

TEST(LibTorchLosses, OfBatchNormOverAllRanksAreThoseOfOneBatch) {
  const int ranks = world().size();
  const Trial run{.stage = 3, .optimizer = R"("SGD", "params": {"lr": 0.01})", .accumulation = 1};
  torch::manual_seed(5);
  NormedImpl plain(nullptr);
  torch::optim::SGD optimizer(plain.parameters(), torch::optim::SGDOptions(0.01));
  const Config config = parse_config(run.json(), ranks);
  Runtime runtime(RuntimeOptions::from(config), all_ranks());
  torch::manual_seed(5);
  NormedImpl net(&runtime);
  lt::Trainer trainer(runtime, net, {.config = config});
  for (std::int64_t step = 0; step < 30; ++step) {
    optimizer.zero_grad();
    const lt::Loss loss = plain.loss(step * 2 * ranks, 2 * ranks);
    const at::Tensor mean = loss.sum / loss.tokens;
    mean.backward();
    optimizer.step();
    const double found =
        trainer.step([&](int) { return net.loss(step * 2 * ranks + 2 * runtime.rank(), 2); }).loss;
    ASSERT_NEAR(found, mean.item<double>(), 1e-6) << step;
  }
  const double wanted = (*plain.torchs)->running_var.sum().item<double>();
  EXPECT_NEAR((*net.ours)->running_var.sum().item<double>(), wanted, 1e-5);
}

}  // namespace
}  // namespace tranche::test
