// A convolutional network with batch norm over all ranks' samples, trained at stage 3, saved and loaded;
// alone or under mpirun.
#include <tranche/libtorch.h>

#include <cstdio>
#include <filesystem>

using namespace tranche;

struct StageImpl : torch::nn::Module {
  StageImpl(Runtime& runtime, std::int64_t in, std::int64_t out) {
    conv = register_module("conv",
                           torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1).bias(false)));
    norm = register_module("norm", libtorch::SynchronizedBatchNorm(runtime, out));
  }
  at::Tensor forward(const at::Tensor& x) { return norm(conv(x)).relu_(); }
  torch::nn::Conv2d conv{nullptr};
  libtorch::SynchronizedBatchNorm norm{nullptr};
};
TORCH_MODULE(Stage);

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(Runtime& runtime)
      : first(this, "first", runtime, 1, 8),
        second(this, "second", runtime, 8, 16),
        head(this, "head", 64, 4) {}
  at::Tensor forward(const at::Tensor& image) {
    const at::Tensor x = torch::max_pool2d(first(image), 2);
    return head(torch::max_pool2d(second(x), 2).flatten(1));
  }
  libtorch::Unit<Stage> first, second;
  libtorch::Unit<torch::nn::Linear> head;
};
TORCH_MODULE(Model);

/// Stripes in four directions, with noise.
libtorch::Loss loss_of(Model& model, std::int64_t count) {
  const at::Tensor kind = torch::randint(4, {count});
  const at::Tensor at = torch::arange(8);
  const at::Tensor down = at.view({1, 8, 1}), across = at.view({1, 1, 8}), k = kind.view({-1, 1, 1});
  const at::Tensor slope = down * (k != 1) + across * (k != 0) * (1 - 2 * (k == 3).to(torch::kLong));
  const at::Tensor image = slope.remainder(3).to(torch::kFloat) + 0.3 * torch::randn({count, 8, 8});
  return {at::cross_entropy_loss(model->forward(image.unsqueeze(1)), kind, {}, at::Reduction::Sum), count};
}

int train(Runtime& runtime) {
  const std::string folder = std::filesystem::temp_directory_path() / "libtorch_convolution";
  if (runtime.rank() == 0) std::filesystem::remove_all(folder);  // removes the folder of an earlier run
  torch::manual_seed(1);                                         // all ranks begin with the same weights
  Model model(runtime);
  libtorch::Trainer trainer(runtime, *model);
  torch::manual_seed(static_cast<std::uint64_t>(1 + runtime.rank()));  // each rank draws its own samples
  for (int step = 1; step <= 60; ++step) {
    const StepResult result = trainer.step([&](int) { return loss_of(model, 16); });
    if (runtime.rank() == 0 && step % 20 == 0) std::printf("step %d loss %.4f\n", step, result.loss);
  }
  trainer.save(folder, {.keep_last = 1, .wait = true});  // includes running means and variances
  trainer.load(folder);
  const EvaluationResult held_out = trainer.evaluate(4, [&](int) { return loss_of(model, 16); });
  if (runtime.rank() == 0) std::printf("held out %.4f\n", held_out.loss);
  return 0;
}

int main() {
  Runtime runtime;
  try {
    runtime = Runtime::from_config(R"({"train_micro_batch_size_per_gpu": 16,
      "optimizer": {"type": "AdamW", "params": {"lr": 0.003}}, "zero_optimization": {"stage": 3}})");
    return train(runtime);
  } catch (...) {
    return runtime.fail(std::current_exception());
  }
}
