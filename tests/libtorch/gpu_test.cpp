// The adapter on a GPU: torch works on the engine's stream, its memory is in the ledger, and all stages have
// equal bits. Without a GPU each test prints why it skips; without LibTorch's CUDA parts there is one test,
// which prints that.

#include <gtest/gtest.h>

#ifdef TRANCHE_LIBTORCH_CUDA

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <string>
#include <vector>

#include "device/cuda_probe.h"
#include "tests/offload/test_folder.h"
#include "tranche/device/cuda_interop.h"
#include "trial.h"

namespace tranche::test {
namespace {

class LibTorchOnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    const tranche::detail::CudaProbe probe = tranche::detail::probe_cuda();
    if (probe.devices.empty()) GTEST_SKIP() << probe.problem;
    if (probe.emulated) GTEST_SKIP() << "the GPU is emulated, and LibTorch needs a real one";
    if (!torch::cuda::is_available()) GTEST_SKIP() << "LibTorch finds no GPU";
  }
};

struct LayerImpl : torch::nn::Module {
  LayerImpl(std::int64_t width, double dropout)
      : linear(register_module("linear", torch::nn::Linear(width, width))),
        norm(register_module("norm", torch::nn::BatchNorm1d(width))),
        drop(dropout) {}
  at::Tensor forward(const at::Tensor& x) {
    return x + torch::dropout(torch::tanh(norm(linear(x))), drop, is_training());
  }
  torch::nn::Linear linear;
  torch::nn::BatchNorm1d norm;
  double drop;
};
TORCH_MODULE(Layer);

struct LayersImpl : torch::nn::Module {
  explicit LayersImpl(double dropout)
      : in(this, "in", 8, 64), layers(this, "layers", 3, 64, dropout), out(this, "out", 64, 1) {}
  at::Tensor forward(const at::Tensor& x) { return out(layers(in(x))); }
  lt::Unit<torch::nn::Linear> in;
  lt::Units<Layer> layers;
  lt::Unit<torch::nn::Linear> out;
};
TORCH_MODULE(Layers);

/// A single rank, because torch's allocator and random numbers are global to the process.
struct Alone {
  Config config;
  Runtime runtime;
  lt::MemoryAccount account;
  Layers net;
  lt::Trainer trainer;

  explicit Alone(const Trial& run, DeviceKind device = DeviceKind::cuda, double dropout = 0)
      : config(parse_config(run.json(), 1)),
        runtime(options_of(config, device),
                [](const CommunicatorOptions& o) { return make_self_communicator(o); }),
        account(lt::account_memory(runtime)),
        net(seeded(dropout)),
        trainer(
            runtime, *net,
            {.recompute = run.recompute ? std::vector<std::string>{"layers.*"} : std::vector<std::string>{},
             .config = config}) {
    torch::manual_seed(100);
  }
  static RuntimeOptions options_of(const Config& config, DeviceKind device) {
    RuntimeOptions options = RuntimeOptions::from(config);
    options.device = device;
    return options;
  }
  static Layers seeded(double dropout) {
    torch::manual_seed(5);
    return Layers(dropout);
  }
  at::Device device() { return net->layers[0]->norm->running_mean.device(); }
  lt::Loss loss(std::int64_t first) {
    const at::Tensor at = torch::arange(16 * 8).view({16, 8}) + first * 8;
    const at::Tensor x = torch::sin(at.to(torch::kFloat) * 0.53f).to(device());
    const at::Tensor wrong = (net->forward(x) - 0.2 * x.sum(1, true)).to(torch::kFloat);
    return {0.25 * (wrong * wrong).sum(), 16};
  }
  StepResult step(std::int64_t index) {
    return trainer.step([&](int m) { return loss(16 * (2 * index + m)); });
  }
  std::string digest() {
    const kernels::Digest digest = trainer.engine().state_digest();
    return std::to_string(digest.lanes[0]) + " " + std::to_string(digest.lanes[1]);
  }
};

TEST_F(LibTorchOnGpu, EveryStageHasTheSameBitsOnTheEnginesStream) {
  for (const char* precision : {"", "bf16"}) {
    std::string first;
    for (const int stage : {0, 1, 2, 3}) {
      Alone rank({.stage = stage, .precision = precision}, DeviceKind::cuda, 0.1);
      const auto ordinal = static_cast<c10::DeviceIndex>(cuda_ordinal(rank.runtime.device()));
      EXPECT_EQ(rank.device(), at::Device(at::kCUDA, ordinal)) << "buffers lie on the GPU";
      for (int step = 0; step < 3; ++step) {
        rank.trainer.step([&](int m) {
          EXPECT_EQ(static_cast<void*>(c10::cuda::getCurrentCUDAStream(ordinal).stream()),
                    rank.trainer.engine().compute_stream().native_handle());
          return rank.loss(16 * (2 * step + m));
        });
      }
      const std::string digest = rank.digest();
      if (first.empty()) first = digest;
      EXPECT_EQ(digest, first) << "stage " << stage << precision;
    }
  }
}

/// Units with batch norm count their samples twice when they run again, so only weights are compared.
TEST_F(LibTorchOnGpu, RecomputationDropsTheSame) {
  std::vector<double> losses[2];
  for (const bool recompute : {false, true}) {
    Alone rank({.stage = 3, .recompute = recompute}, DeviceKind::cuda, 0.3);
    for (int step = 0; step < 4; ++step) losses[recompute ? 1 : 0].push_back(rank.step(step).loss);
  }
  EXPECT_EQ(losses[1], losses[0]);
}

TEST_F(LibTorchOnGpu, LossesAreThoseOfTheCpu) {
  const Trial run{.stage = 3, .optimizer = R"("SGD", "params": {"lr": 0.01, "momentum": 0.9})"};
  std::vector<double> of_cpu;
  {
    Alone rank(run, DeviceKind::cpu);
    for (int step = 0; step < 20; ++step) of_cpu.push_back(rank.step(step).loss);
  }
  Alone rank(run);
  for (int step = 0; step < 20; ++step) {
    const double wanted = of_cpu[static_cast<std::size_t>(step)];
    EXPECT_NEAR(rank.step(step).loss, wanted, 1e-4 * wanted)
        << "step " << step;  // fp32 sums are in other orders
  }
  EXPECT_LT(of_cpu.back(), 0.5 * of_cpu.front()) << "it learns";
}

TEST_F(LibTorchOnGpu, TorchsMemoryIsInTheLedgerAndUnderItsLimit) {
  Alone rank({.stage = 3, .tranche = R"(, "device_memory": "512MiB")"});
  rank.step(0);
  const std::int64_t before = rank.runtime.ledger().total(Tier::device);
  {
    const at::Tensor some =
        torch::empty({64 << 20}, at::TensorOptions().dtype(torch::kByte).device(rank.device()));
    EXPECT_GE(rank.runtime.ledger().total(Tier::device), before + (64 << 20));
  }
  c10::cuda::CUDACachingAllocator::emptyCache();
  EXPECT_LE(rank.runtime.ledger().total(Tier::device), before);
  try {
    rank.trainer.step([&](int m) {
      torch::empty({std::int64_t{2} << 30}, at::TensorOptions().dtype(torch::kByte).device(rank.device()));
      return rank.loss(16 * m);
    });
    ADD_FAILURE() << "nothing was thrown";
  } catch (const OutOfMemory& error) {
    EXPECT_NE(error.message().find("'torch' (activations) asks for 2.00 GiB of the GPU"), std::string::npos)
        << error.message();
    EXPECT_NE(error.message().find("optimizer"), std::string::npos) << "the table: " << error.message();
  }
}

TEST_F(LibTorchOnGpu, ACheckpointHasBuffersAndTheRandomStateOfTheGpu) {
  const testing::TestFolder folder;
  Alone rank({.stage = 3}, DeviceKind::cuda, 0.3);
  rank.step(0);
  rank.trainer.save(folder.path(), {.wait = true});
  const double wanted = rank.step(1).loss;
  const std::string digest = rank.digest();
  const double mean = rank.net->layers[0]->norm->running_mean.sum().item<double>();
  torch::manual_seed(900);
  rank.trainer.load(folder.path());
  EXPECT_EQ(rank.step(1).loss, wanted);
  EXPECT_EQ(rank.digest(), digest);
  EXPECT_EQ(rank.net->layers[0]->norm->running_mean.sum().item<double>(), mean);
}

}  // namespace
}  // namespace tranche::test

#else

TEST(LibTorchOnGpu, NeedsLibTorchsCudaParts) {
  GTEST_SKIP() << TRANCHE_LIBTORCH_NO_CUDA;
}

#endif
