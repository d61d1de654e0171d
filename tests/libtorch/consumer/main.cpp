#include <tranche/libtorch.h>

#include <cstdio>

using namespace tranche;

struct NetImpl : torch::nn::Module {
  libtorch::Unit<torch::nn::Linear> in{this, "in", 2, 64};
  libtorch::Units<torch::nn::Linear> hidden{this, "hidden", 2, 64, 64};
  libtorch::Unit<torch::nn::Linear> out{this, "out", 64, 1};
  at::Tensor forward(at::Tensor x) {
    x = torch::tanh(in(x));
    return out(torch::tanh(hidden(x)));
  }
};
TORCH_MODULE(Net);

int main() {
  Runtime runtime;
  try {
    runtime = Runtime::from_config(R"({"train_micro_batch_size_per_gpu": 64,
      "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": {"stage": 3}})");
    const auto account = libtorch::account_memory(runtime);
    torch::manual_seed(1);  // equal on all ranks
    Net net;
    libtorch::Trainer trainer(runtime, *net);
    torch::manual_seed(static_cast<std::uint64_t>(runtime.rank()));
    StepResult result;
    for (int step = 0; step < 100; ++step) {
      result = trainer.step([&](int) {
        const at::Tensor x = torch::randn({64, 2});
        return libtorch::Loss{torch::mse_loss(net->forward(x), x.prod(1, true), at::Reduction::Sum), 64};
      });
    }
    std::printf("rank %d of %d learned: %s\n", runtime.rank(), runtime.size(),
                result.loss < 0.5 ? "yes" : "no");
  } catch (...) {
    return runtime.fail(std::current_exception());
  }
}
