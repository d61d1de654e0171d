// Settings that the adapter refuses, and the accounting and limits of torch's memory.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "rank.h"
#include "tests/core/error_text.h"

namespace tranche::test {
namespace {

/// An error that ends an engine also ends the communicator and MPI, whose finalization would wait for ever.
/// So each rank is alone here; libtorch_throwing tests errors of peers.
Factory alone() {
  return [](const CommunicatorOptions& options) { return make_self_communicator(options); };
}

TEST(LibTorchMemory, TorchsTensorsAreInTheLedgerAndUnderItsLimit) {
  if (world().size() != 1) GTEST_SKIP() << "one rank is enough";
  const Trial run{.tranche = R"(, "device_memory": "64MiB")"};
  const Config config = parse_config(run.json(), 1);
  for (const bool in_backward : {false, true}) {
    Runtime runtime(RuntimeOptions::from(config), alone());
    const auto account = lt::account_memory(runtime);
    EXPECT_NE(message_of<LogicError>([&] {
                (void)lt::account_memory(runtime);
              }).find("accounted for another runtime"),
              std::string::npos);
    const std::int64_t before = runtime.ledger().total(Tier::device);
    {
      const at::Tensor some = torch::empty({1 << 20}, torch::kByte);
      EXPECT_EQ(runtime.ledger().total(Tier::device),
                before + (1 << 20) + memory_alignment);  // includes the header
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

/// The text of torch's own error, or of ours.
template <class Function>
std::string text_of_error(Function&& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.message();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return nothing_thrown;
}

std::string refusal_of_second_trainer(Rank<Gpt>& rank) {
  return message_of<LogicError>(
      [&] { const lt::Trainer second(rank.runtime, *rank.net, {.config = rank.config}); });
}

/// The error of a step of a network with one unit.
template <class Held, class... Arguments>
std::string error_of_one(const Trial& run, Arguments... arguments) {
  struct NetImpl : torch::nn::Module {
    explicit NetImpl(Arguments... values) : only(this, "only", values...) {}
    lt::Unit<Held> only;
  };
  const Config config = parse_config(run.json(), 1);
  Runtime runtime(RuntimeOptions::from(config), alone());
  torch::manual_seed(1);
  NetImpl net(arguments...);
  try {
    lt::Trainer trainer(runtime, net, {.config = config});
    trainer.step([&](int) { return lt::Loss{net.only(torch::arange(3)).sum(), 3}; });
  } catch (const Error& error) {
    return error.message();
  }
  return nothing_thrown;
}

struct WholeNumbersImpl : torch::nn::Module {
  at::Tensor table{register_parameter("table", torch::arange(3), /*requires_grad=*/false)};
  at::Tensor forward(const at::Tensor& x) { return table + x; }
};
TORCH_MODULE(WholeNumbers);

TEST(LibTorchErrors, SparseGradientsAndWholeNumbersAreRefused) {
  const Trial run{.stage = 3, .accumulation = 1};
  const std::string sparse =
      error_of_one<torch::nn::Embedding>(run, torch::nn::EmbeddingOptions(5, 4).sparse(true));
  EXPECT_NE(sparse.find("the gradient of only.weight is sparse"), std::string::npos) << sparse;
  const std::string whole = error_of_one<WholeNumbers>(run);
  EXPECT_NE(whole.find("parameter only.table has dtype Long; parameters are floating-point"),
            std::string::npos)
      << whole;
}

TEST(LibTorchErrors, OnMetaNoModuleRuns) {
  const Config config = parse_config(Trial{.stage = 3, .accumulation = 1}.json(), 1);
  RuntimeOptions options = RuntimeOptions::from(config);
  options.device = DeviceKind::meta;
  Runtime runtime(options, alone());
  Gpt net = seeded<Gpt>();
  EXPECT_EQ(message_of<ConfigurationError>([&] { lt::Trainer(runtime, *net, {.config = config}); }),
            "device meta runs no module of LibTorch, so what its activations take is not known");
}

TEST(LibTorchErrors, ADeferredUnitHasNoMemoryBeforeThereIsATrainer) {
  if (!lt::detail::names_closed_parameters) GTEST_SKIP() << "this LibTorch cannot say it";
  Gpt net(lt::deferred, 0.0);
  std::string text;
  try {
    net->forward(torch::arange(15).view({1, 15}));
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  }
  EXPECT_NE(text.find("of a deferred unit is used before there is a Trainer"), std::string::npos) << text;
}

TEST(LibTorchErrors, SayWhatToDo) {
  const Trial run{.stage = 3, .accumulation = 1};
  const auto error_of = [&](auto&& forward) {
    Rank<Gpt> rank(run, alone(), 1, seeded<Gpt>());
    return text_of_error([&] { rank.trainer.step([&](int) { return forward(rank.net); }); });
  };
  const auto expect = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  if (lt::detail::names_closed_parameters) {
    expect(error_of([](Gpt& net) {
             return lt::Loss{loss_of(net, 0, 2).sum + net->token->weight.sum(), 30};
           }),
           "parameter token.weight is used while its unit is not gathered");
  }
  // Only the trainer runs backward; another backward would find no weights.
  expect(error_of([](Gpt& net) {
           lt::Loss loss = loss_of(net, 0, 2);
           loss.sum.backward({}, /*retain_graph=*/true);
           return loss;
         }),
         "inside the closure: leave it out and return the loss, the trainer goes back itself");
  expect(error_of([](Gpt& net) {
           return lt::Loss{loss_of(net, 0, 2).sum.detach(), 30};
         }),
         "wants no gradient");
  expect(error_of([](Gpt&) { return lt::Loss{torch::ones({2}).requires_grad_(), 30}; }), "has 2 elements");

  {
    Rank<Gpt> rank(run, alone(), 1, seeded<Gpt>());
    at::Tensor kept;
    rank.trainer.step([&](int) {
      kept = loss_of(rank.net, 2, 2).sum;
      return loss_of(rank.net, 0, 2);
    });
    const std::string text = text_of_error([&] {
      rank.trainer.step([&](int) { return lt::Loss{loss_of(rank.net, 2, 2).sum + kept, 30}; });
    });
    expect(text, "modified by an inplace operation");  // a graph that is kept beyond the step
    expect(refusal_of_second_trainer(rank), "unit token is another Trainer's: a model has one at a time");
  }

  struct LooseImpl : torch::nn::Module {
    lt::Unit<torch::nn::Linear> in{this, "in", 2, 2};
    torch::nn::Linear loose{register_module("loose", torch::nn::Linear(2, 2))};
  } loose;
  const Config config = parse_config(run.json(), 1);
  Runtime runtime(RuntimeOptions::from(config), alone());
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
  other.lora.rank = 4;
  expect(refusal(*net, {.config = other}), "tranche.lora: Tranche's own models honour it");
  expect(refusal(*net, {.matrices = {{"token.weight"}, {"layers.*.bias"}}, .config = config}),
         "matrices: 'layers.*.bias' names no parameter of two dimensions");
  expect(refusal(*net, {.matrices = {{"layers.*.up.weight", 5}}, .config = config}), "5 matrices");
  other = config;
  other.optimizer.type = "Muon";
  expect(refusal(*net, {.config = other}), "choose AdamW, or mark the matrices");
  other = config;
  other.frozen = {"layer.*"};
  expect(refusal(*net, {.config = other}), "pattern 'layer.*' in tranche.frozen");
  other = config;
  other.vocabulary_chunk = 8;
  expect(refusal(*net, {.config = other}), "tranche.vocabulary_chunk");
}

}  // namespace
}  // namespace tranche::test
