// A Trainer's functions besides steps: checkpoints, initial weights, export, memory, errors.

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "rank.h"
#include "tests/core/error_text.h"

namespace tranche::test {
namespace {

TEST(LibTorchCheckpoints, SavedByTwoRanksLoadedByOneAndThree) {
  if (world().size() != 3) GTEST_SKIP() << "needs 3 ranks";
  const MpiFolder folder;
  const Trial three{.stage = 3};
  std::string saved;
  double loss = 0, mean = 0, held_out = 0;
  const auto fixed = [](Rank<Convolutions>& rank) {  // the same samples on every rank
    return rank.trainer.evaluate(1, [&](int) { return loss_of(rank.net, 5000, 3); }).loss;
  };
  auto two = world().split(world().rank() < 2 ? 0 : -1, world().rank());
  if (two) {
    Rank<Convolutions> rank(three, group_of(two), 2, seeded<Convolutions>());
    for (int step = 0; step < 3; ++step) rank.step(step);
    rank.trainer.save(folder.path(), {.wait = true});
    saved = text_of(rank.trainer.engine().state_digest());
    loss = rank.evaluate();
    mean = rank.net->first->norm->running_mean.sum().item<double>();
    // Continues, then returns to the checkpoint.
    rank.step(3);
    EXPECT_NE(text_of(rank.trainer.engine().state_digest()), saved);
    rank.trainer.load(folder.path());
    EXPECT_EQ(text_of(rank.trainer.engine().state_digest()), saved);
    EXPECT_EQ(rank.evaluate(), loss);
    EXPECT_EQ(rank.net->first->norm->running_mean.sum().item<double>(), mean);
  }
  if (auto first = world().split(world().rank() == 0 ? 0 : -1, 0)) {
    Rank<Convolutions> rank({.stage = 2}, group_of(first), 1, seeded<Convolutions>());
    rank.trainer.load(folder.path());
    held_out = fixed(rank);
  }
  world().broadcast(&held_out, 1, DataType::float64, 0, {}, {"loss", "test", Traffic::control}).wait();
  saved.resize(64);
  world().broadcast(saved.data(), 64, DataType::uint8, 0, {}, {"digest", "test", Traffic::control}).wait();
  world().broadcast(&mean, 1, DataType::float64, 0, {}, {"mean", "test", Traffic::control}).wait();
  for (const int ranks : {3, 1}) {
    auto group = world().split(world().rank() < ranks ? 0 : -1, world().rank());
    if (!group) continue;
    Trial run{.stage = ranks == 3 ? 3 : 0};
    torch::manual_seed(77);  // other weights, which load() replaces
    Rank<Convolutions> rank(run, group_of(group), ranks, Convolutions());
    rank.trainer.load(folder.path());
    std::string found = text_of(rank.trainer.engine().state_digest());
    found.resize(64);
    EXPECT_EQ(found, saved) << ranks << " ranks";
    EXPECT_EQ(rank.net->first->norm->running_mean.sum().item<double>(), mean)
        << "rank 0's buffers are all ranks'";
    EXPECT_NEAR(fixed(rank), held_out, 1e-6) << ranks << " ranks";
    EXPECT_TRUE(rank.step(3).applied);
  }
}

TEST(LibTorchCheckpoints, ARunWithDropoutGoesOnAsIfNothingHadBeen) {
  const MpiFolder folder;
  const auto seed = [](std::uint64_t value) {
    torch::manual_seed(value + static_cast<std::uint64_t>(world().rank()));
  };
  Rank<Gpt> rank({.stage = 3, .recompute = true}, all_ranks(), world().size(), seeded<Gpt>(0.3));
  seed(100);
  rank.step(0);
  rank.trainer.save(folder.path(), {.wait = true});
  rank.step(1);
  const std::string wanted = text_of(rank.trainer.engine().state_digest());
  seed(900);
  rank.trainer.load(folder.path());
  rank.step(1);
  EXPECT_EQ(text_of(rank.trainer.engine().state_digest()), wanted) << "each rank's random state was saved";
  rank.trainer.load(folder.path());
  seed(900);
  rank.step(1);
  EXPECT_NE(text_of(rank.trainer.engine().state_digest()), wanted) << "which matters";
}

TEST(LibTorchCheckpoints, OfAnotherModuleAreRefused) {
  const MpiFolder folder;
  Rank<Convolutions> rank({.stage = 3}, all_ranks(), world().size(), seeded<Convolutions>());
  rank.trainer.engine().save(folder.path(), {.wait = true});  // saves without buffers
  const std::string text = message_of<CheckpointError>([&] { rank.trainer.load(folder.path()); });
  EXPECT_NE(text.find("has no buffer first.norm.running_mean of fp32[5] (it has none)"), std::string::npos)
      << text;
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
  const MpiFolder folder;
  const std::string torch_file = folder.path() + "/weights.pt",
                    safe_file = folder.path() + "/weights.safetensors";
  Rank<Convolutions> rank({.stage = 3}, all_ranks(), world().size(), seeded<Convolutions>());
  rank.step(0);
  rank.trainer.export_torch(torch_file);
  rank.trainer.export_safetensors(safe_file);
  const std::vector<float> weight = rank.trainer.engine().read_weight("second.conv.weight");
  EXPECT_NE(message_of<IoError>([&] {
              rank.trainer.export_torch("/nonexistent/x.pt");
            }).find("cannot write /nonexistent/x.pt"),
            std::string::npos);
  rank.step(1);  // training continues
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

TEST(LibTorchUnit, WithoutATrainerIsItsModule) {
  Gpt net = seeded<Gpt>();
  const lt::Loss loss = loss_of(net, 0, 2);
  loss.sum.backward();
  EXPECT_TRUE(net->layers[2]->down->weight.grad().defined());
  EXPECT_EQ(net->named_parameters().keys().front(), "token.weight");
  EXPECT_TRUE(net->named_parameters().contains("layers.2.down.weight"));
}

TEST(LibTorchInference, GivesWhatTheModuleGives) {
  Rank<Gpt> rank({.stage = 3}, all_ranks(), world().size(), seeded<Gpt>(0.5));
  Gpt plain = seeded<Gpt>(0.5);
  plain->eval();
  const at::Tensor tokens = torch::arange(30).view({2, 15});
  for (int pass = 0; pass < 3; ++pass) {  // recorded, planned, repeated
    const at::Tensor found = rank.trainer.inference([&] { return rank.net->forward(tokens); });
    EXPECT_FALSE(found.requires_grad());
    EXPECT_TRUE(at::equal(found, plain->forward(tokens))) << pass;
    EXPECT_TRUE(rank.net->is_training()) << "its mode is its own again";
  }
  EXPECT_GT(rank.step(0).loss, 0);
}

}  // namespace
}  // namespace tranche::test
