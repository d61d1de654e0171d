// The adapter's laws under mpirun: the same bits at every stage, the losses of plain LibTorch, exact traffic
// and memory, checkpoints over numbers of ranks, initial weights, errors.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "networks.h"
#include "tests/comm/mpi_main.h"
#include "tests/core/error_text.h"

namespace tranche::test {
namespace {

using Factory = CommunicatorFactory;

std::string text_of(const kernels::Digest& digest) {
  return std::to_string(digest.lanes[0]) + " " + std::to_string(digest.lanes[1]);
}

Factory all_ranks() {
  return [](const CommunicatorOptions& options) { return make_mpi_communicator(options); };
}
/// The group of the first `ranks` ranks, which alone make a runtime of it.
Factory group_of(std::unique_ptr<Communicator>& group) {
  return [&](const CommunicatorOptions&) { return std::move(group); };
}

template <class Net>
struct Rank {
  Trial run;
  Config config;
  Runtime runtime;
  Net net;
  lt::Trainer trainer;

  Rank(const Trial& r, const Factory& factory, int ranks, Net made, std::vector<std::string> recompute = {})
      : run(r),
        config(parse_config(r.json(), ranks)),
        runtime(RuntimeOptions::from(config), factory),
        net(std::move(made)),
        trainer(runtime, *net,
                {.tokens_per_sample = 15,
                 .recompute =
                     r.recompute && recompute.empty() ? std::vector<std::string>{"*"} : std::move(recompute),
                 .config = config}) {}

  StepResult step(std::int64_t index) {
    return trainer.step(
        [&](int m) { return loss_of(net, first_sample(index, m, run, runtime.rank(), runtime.size()), 2); });
  }
  double evaluate() {
    return trainer
        .evaluate(2, [&](int m) { return loss_of(net, 1000 + 2 * (m * runtime.size() + runtime.rank()), 2); })
        .loss;
  }
};

template <class Net>
Net seeded(double dropout = 0) {
  torch::manual_seed(5);
  return Net(dropout);
}

template <class Net>
std::string digest_after(const Trial& run, int steps, double dropout) {
  Rank<Net> rank(run, all_ranks(), world().size(), seeded<Net>(dropout));
  torch::manual_seed(100 + static_cast<std::uint64_t>(rank.runtime.rank()));  // what is dropped differs
  double loss = 0;
  for (int step = 0; step < steps; ++step) loss = rank.step(step).loss;
  return text_of(rank.trainer.engine().state_digest()) + " loss " + std::to_string(loss) + " held-out " +
         std::to_string(rank.evaluate());
}

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
TEST(LibTorchLaws, ConvolutionsHaveThem) {
  // Recomputed, batch norm would count its samples twice (docs/guides/libtorch.md).
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

TEST(LibTorchLaws, CopiesOfAShardedModelHaveTheLossesOfOneGroup) {
  if (world().size() % 2 != 0) GTEST_SKIP() << "an odd number of ranks";
  const std::string one = digest_after<Gpt>({.stage = 3}, 3, 0.1);
  EXPECT_EQ(digest_after<Gpt>({.stage = 3, .tranche = R"(, "mesh": "replicate=2, shard=*")"}, 3, 0.1), one);
}

/// Losses of 60 steps by torch's own optimizer in one process, which goes through all ranks' micro-batches.
template <class Net, class Optimizer, class Options>
std::vector<double> plain_losses(const Trial& run, Options options) {
  Net net = seeded<Net>();
  Optimizer optimizer(net->parameters(), options);
  std::vector<double> losses;
  for (int step = 0; step < 60; ++step) {
    optimizer.zero_grad();
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
    optimizer.step();
    losses.push_back(mean.template item<double>());
  }
  return losses;
}

template <class Net>
void expect_losses_of(const Trial& run, const std::vector<double>& wanted, double tolerance = 1e-6) {
  Rank<Net> rank(run, all_ranks(), world().size(), seeded<Net>());
  double worst = 0;
  for (int step = 0; step < 60; ++step) {
    worst = std::max(worst, std::abs(rank.step(step).loss - wanted[std::size_t(step)]));
  }
  EXPECT_LE(worst, tolerance) << run.json();
  if (world().rank() == 0)
    std::printf("largest difference %.1e of 60 losses, the last %.7f\n", worst, wanted[59]);
}

template <class Net>
void expect_plain_losses() {
  Trial run{.stage = 3, .tranche = R"(, "decay": ["*"])"};  // as in torch, where biases and norms decay too
  run.accumulation = 1;
  // Epsilon stands above the rounding of gradients, which Adam makes as large as any other.
  run.optimizer = R"("AdamW", "params": {"lr": 0.001, "weight_decay": 0.01, "eps": 1e-6})";
  expect_losses_of<Net>(run, plain_losses<Net, torch::optim::AdamW>(
                                 run, torch::optim::AdamWOptions(0.001).weight_decay(0.01).eps(1e-6)));
  run.stage = 0;
  run.optimizer = R"("SGD", "params": {"lr": 0.01, "momentum": 0.9})";
  expect_losses_of<Net>(
      run, plain_losses<Net, torch::optim::SGD>(run, torch::optim::SGDOptions(0.01).momentum(0.9)));
}

TEST(LibTorchLosses, OfATransformerAreThoseOfPlainLibTorch) {
  expect_plain_losses<Gpt>();
}
TEST(LibTorchLosses, OfConvolutionsAreThoseOfPlainLibTorch) {
  expect_plain_losses<Convolutions>();
}
TEST(LibTorchLosses, OfUnusedParametersAreThoseOfPlainLibTorch) {
  Trial run{.stage = 3};
  run.accumulation = 1;
  // torch::optim passes over a parameter without a gradient; without decay and momentum so does a zero.
  run.optimizer = R"("SGD", "params": {"lr": 0.01})";
  expect_losses_of<Choosing>(run,
                             plain_losses<Choosing, torch::optim::SGD>(run, torch::optim::SGDOptions(0.01)));
}

/// Batch norm over all ranks, or, where there is no runtime, torch's own over the whole batch.
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
    const at::Tensor wrong = forward(x) - x.sum({1, 2}).unsqueeze(1);
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
    ASSERT_NEAR(found, mean.item<double>(), 2e-6) << step;  // torch adds statistics up in fp32
  }
  const double wanted = (*plain.torchs)->running_var.sum().item<double>();
  EXPECT_NEAR((*net.ours)->running_var.sum().item<double>(), wanted, 1e-5);
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
        // Gathers: the embedding's four, two of each other unit; one reduction of each; two micro-batches.
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
    // fp32 AdamW, several micro-batches: design.md's table, without padding.
    const std::int64_t p = 4 * engine.model().parameters(), n = world().size();
    const std::int64_t wanted = run.stage == 0 ? 4 * p : run.stage < 3 ? 1 * p + 3 * p / n : 4 * p / n;
    EXPECT_NEAR(double(bytes.parameters + bytes.gradients + bytes.optimizer - bytes.padding), double(wanted),
                run.stage == 0 ? 0 : 16 * 4096);
  }
}

TEST(LibTorchCheckpoints, SavedByTwoRanksLoadedByOneAndThree) {
  if (world().size() != 3) GTEST_SKIP() << "needs 3 ranks";
  const auto folder = std::filesystem::temp_directory_path() / "tranche_libtorch_checkpoint";
  if (world().rank() == 0) std::filesystem::remove_all(folder);
  world().barrier({"", "clean", Traffic::control}).wait();
  const Trial three{.stage = 3};
  std::string saved;
  double loss = 0, mean = 0;
  auto two = world().split(world().rank() < 2 ? 0 : -1, world().rank());
  if (two) {
    Rank<Convolutions> rank(three, group_of(two), 2, seeded<Convolutions>());
    for (int step = 0; step < 3; ++step) rank.step(step);
    rank.trainer.save(folder, {.wait = true});
    saved = text_of(rank.trainer.engine().state_digest());
    loss = rank.evaluate();
    mean = rank.net->first->norm->running_mean.sum().item<double>();
    // Goes on, and back.
    rank.step(3);
    EXPECT_NE(text_of(rank.trainer.engine().state_digest()), saved);
    rank.trainer.load(folder);
    EXPECT_EQ(text_of(rank.trainer.engine().state_digest()), saved);
    EXPECT_EQ(rank.evaluate(), loss);
    EXPECT_EQ(rank.net->first->norm->running_mean.sum().item<double>(), mean);
  }
  saved.resize(64);
  world().broadcast(saved.data(), 64, DataType::uint8, 0, {}, {"digest", "test", Traffic::control}).wait();
  world().broadcast(&mean, 1, DataType::float64, 0, {}, {"mean", "test", Traffic::control}).wait();
  for (const int ranks : {3, 1}) {
    auto group = world().split(world().rank() < ranks ? 0 : -1, world().rank());
    if (!group) continue;
    Trial run{.stage = ranks == 3 ? 3 : 0};
    torch::manual_seed(77);  // other weights, which load() replaces
    Rank<Convolutions> rank(run, group_of(group), ranks, Convolutions());
    rank.trainer.load(folder);
    std::string found = text_of(rank.trainer.engine().state_digest());
    found.resize(64);
    EXPECT_EQ(found, saved) << ranks << " ranks";
    EXPECT_EQ(rank.net->first->norm->running_mean.sum().item<double>(), mean)
        << "rank 0's buffers are all ranks'";
  }
}

TEST(LibTorchInitialWeights, AreTheModulesOnEveryNumberOfRanksBuiltAtOnceOrByUnits) {
  const auto digest = [](const Factory& factory, int ranks, bool deferred) {
    torch::manual_seed(5);
    Rank<Gpt> rank({.stage = 3}, factory, ranks, deferred ? Gpt(lt::deferred, 0.0) : Gpt(0.0));
    torch::manual_seed(5);
    Gpt plain(0.0);
    const std::vector<float> weight = rank.trainer.engine().read_weight("layers.1.up.weight");
    const at::Tensor wanted = plain->layers[1]->up->weight.detach().contiguous();
    EXPECT_EQ(std::vector<float>(wanted.data_ptr<float>(), wanted.data_ptr<float>() + wanted.numel()),
              weight);
    return text_of(rank.trainer.engine().weights_digest());
  };
  const std::string all = digest(all_ranks(), world().size(), false);
  EXPECT_EQ(digest(all_ranks(), world().size(), true), all);
  auto alone = world().split(world().rank(), 0);
  EXPECT_EQ(digest(group_of(alone), 1, true), all);
}

TEST(LibTorchInitialWeights, ThatDifferOverRanksAreRefused) {
  if (world().size() == 1) GTEST_SKIP() << "one rank";
  const Trial run{.stage = 3};
  const Config config = parse_config(run.json(), world().size());
  Runtime runtime(RuntimeOptions::from(config), all_ranks());
  torch::manual_seed(static_cast<std::uint64_t>(world().rank()));
  Gpt net(0.0);
  const std::string text =
      message_of<ConfigurationError>([&] { const lt::Trainer trainer(runtime, *net, {.config = config}); });
  EXPECT_NE(text.find("rank 1 starts with other weights than rank 0: seed torch alike"), std::string::npos)
      << text;
}

TEST(LibTorchExport, SafetensorsAndTorchSaveHaveTheWeightsAndBuffers) {
  const std::string folder = std::filesystem::temp_directory_path();
  const std::string torch_file = folder + "/tranche_libtorch.pt",
                    safe_file = folder + "/tranche_libtorch.safetensors";
  Rank<Convolutions> rank({.stage = 3}, all_ranks(), world().size(), seeded<Convolutions>());
  rank.step(0);
  rank.trainer.export_torch(torch_file);
  rank.trainer.export_safetensors(safe_file);
  const std::vector<float> weight = rank.trainer.engine().read_weight("second.conv.weight");
  EXPECT_NE(message_of<IoError>([&] {
              rank.trainer.export_torch("/nonexistent/x.pt");
            }).find("cannot write /nonexistent/x.pt"),
            std::string::npos);
  rank.step(1);  // training goes on
  if (world().rank() != 0) return;
  Convolutions plain;
  torch::load(plain, torch_file);
  const at::Tensor loaded = plain->second->conv->weight.detach().contiguous();
  EXPECT_EQ(std::vector<float>(loaded.data_ptr<float>(), loaded.data_ptr<float>() + loaded.numel()), weight);
  EXPECT_EQ(plain->first->norm->num_batches_tracked.item<std::int64_t>(), 2);
  std::ifstream file(safe_file, std::ios::binary);
  std::uint64_t length = 0;
  file.read(reinterpret_cast<char*>(&length), 8);
  std::string header(length, ' ');
  file.read(header.data(), std::streamsize(length));
  const auto json = nlohmann::json::parse(header);
  const auto entry = json.at("second.conv.weight");
  EXPECT_EQ(entry["dtype"], "F32");
  EXPECT_EQ(entry["shape"], nlohmann::json({7, 5, 3, 3}));
  EXPECT_TRUE(json.contains("first.norm.running_mean"));
  file.seekg(std::streamoff(8 + length + entry["data_offsets"][0].get<std::uint64_t>()));
  std::vector<float> values(weight.size());
  file.read(reinterpret_cast<char*>(values.data()), std::streamsize(values.size() * 4));
  EXPECT_EQ(values, weight);
}

TEST(LibTorchMemory, TorchsTensorsAreInTheLedgerAndUnderItsLimit) {
  if (world().size() != 1) GTEST_SKIP() << "one rank is enough";
  const Trial run{.tranche = R"(, "device_memory": "64MiB")"};
  const Config config = parse_config(run.json(), 1);
  for (const bool in_backward : {false, true}) {
    Runtime runtime(RuntimeOptions::from(config), all_ranks());
    const auto account = lt::account_memory(runtime);
    EXPECT_NE(message_of<LogicError>([&] {
                (void)lt::account_memory(runtime);
              }).find("accounted for another runtime"),
              std::string::npos);
    const std::int64_t before = runtime.ledger().total(Tier::device);
    {
      const at::Tensor some = torch::empty({1 << 20}, torch::kByte);
      EXPECT_EQ(runtime.ledger().total(Tier::device),
                before + (1 << 20) + memory_alignment);  // with its header
    }
    Gpt net = seeded<Gpt>();
    lt::Trainer trainer(runtime, *net, {.config = config});
    try {
      trainer.step([&](int) {
        lt::Loss loss = loss_of(net, 0, 2);
        if (!in_backward) torch::empty({100 << 20}, torch::kByte);
        loss.sum.register_hook([=](const at::Tensor& gradient) {
          torch::empty({100 << 20}, torch::kByte);
          return gradient;
        });
        return loss;
      });
      ADD_FAILURE() << "nothing was thrown";
    } catch (const OutOfMemory& error) {
      EXPECT_EQ(error.exit_status(), ExitStatus::out_of_memory);
      EXPECT_NE(error.message().find("forward of token: 'torch' (activations) asks for 100.00 MiB"),
                std::string::npos)
          << error.message();
      EXPECT_NE(error.message().find("optimizer"), std::string::npos) << "the table: " << error.message();
    }
  }
}

TEST(LibTorchErrors, SayWhatToDo) {
  const Trial run{.stage = 3, .accumulation = 1};
  const auto error_of = [&](auto&& forward) {
    Rank<Gpt> rank(run, all_ranks(), world().size(), seeded<Gpt>());
    std::string text;
    try {
      rank.trainer.step([&](int) { return forward(rank.net); });
    } catch (const Error& error) {
      text = error.message();
    } catch (const c10::Error& error) {
      text = error.what_without_backtrace();
    }
    return text;
  };
  const auto expect = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect(error_of([](Gpt& net) {
           return lt::Loss{loss_of(net, 0, 2).sum + net->token->weight.sum(), 30};
         }),
         "parameter token.weight is used while its unit is not gathered");
  expect(error_of([](Gpt& net) {
           return lt::Loss{loss_of(net, 0, 2).sum.detach(), 30};
         }),
         "wants no gradient");
  expect(error_of([](Gpt&) { return lt::Loss{torch::ones({2}).requires_grad_(), 30}; }), "has 2 elements");

  struct LooseImpl : torch::nn::Module {
    lt::Unit<torch::nn::Linear> in{this, "in", 2, 2};
    torch::nn::Linear loose{register_module("loose", torch::nn::Linear(2, 2))};
  } loose;
  const Config config = parse_config(run.json(), world().size());
  Runtime runtime(RuntimeOptions::from(config), all_ranks());
  const auto refusal = [&](torch::nn::Module& net, lt::TrainerOptions options) {
    std::string text;
    try {
      lt::Trainer trainer(runtime, net, std::move(options));
    } catch (const Error& error) {
      text = error.message();
    }
    return text;
  };
  expect(refusal(loose, {.config = config}), "parameter loose.weight lies in no unit: hold its module");
  Gpt net = seeded<Gpt>();
  expect(refusal(*net, {.recompute = {"blocks.*"}, .config = config}),
         "recompute: 'blocks.*' names none of the units token, layers.0");
  Config other = config;
  other.checkpoint_every = 2;
  expect(refusal(*net, {.config = other}), "tranche.checkpoint_every: Tranche's own models honour it");
  other = config;
  other.offload.activations = true;
  expect(refusal(*net, {.config = other}), "cpu_checkpointing");
  other = config;
  other.vocabulary_chunk = 8;
  expect(refusal(*net, {.config = other}), "tranche.vocabulary_chunk");
}

TEST(LibTorchUnit, WithoutATrainerIsItsModule) {
  Gpt net = seeded<Gpt>();
  const lt::Loss loss = loss_of(net, 0, 2);
  loss.sum.backward();
  EXPECT_TRUE(net->layers[2]->down->weight.grad().defined());
  EXPECT_EQ(net->named_parameters().keys().front(), "token.weight");
  EXPECT_TRUE(net->named_parameters().contains("layers.2.down.weight"));
}

}  // namespace
}  // namespace tranche::test
