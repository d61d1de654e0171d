// A transformer of torch::nn modules, trained at whatever stage the configuration says: alone, or under
// mpirun.
//   libtorch_gpt [CONFIG]      the path of a DeepSpeed configuration; by default stage 3 with AdamW
#include <tranche/libtorch.h>

#include <cstdio>

using namespace tranche;

struct BlockImpl : torch::nn::Module {  // ordinary LibTorch
  explicit BlockImpl(std::int64_t width) {
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    mix = register_module("mix", torch::nn::Linear(width, 3 * width));
    out = register_module("out", torch::nn::Linear(width, width));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto part = mix(norm1(x)).unflatten(-1, {3, -1, 16}).permute({2, 0, 3, 1, 4});  // heads of 16
    const at::Tensor y =
        at::scaled_dot_product_attention(part[0], part[1], part[2], {}, 0.0, /*is_causal=*/true);
    const at::Tensor z = x + out(y.transpose(1, 2).flatten(2));
    return z + down(torch::gelu(up(norm2(z))));
  }
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear mix{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct ModelImpl : torch::nn::Module {  // Unit marks what is gathered together
  libtorch::Unit<torch::nn::Embedding> token{this, "token", 256, 64};
  libtorch::Units<Block> layers{this, "layers", 4, 64};
  libtorch::Unit<torch::nn::LayerNorm> norm{this, "norm", torch::nn::LayerNormOptions({64})};
  at::Tensor forward(const at::Tensor& tokens) {
    return token.with([](auto& e, const at::Tensor& x) { return x.matmul(e->weight.t()); },  // tied
                      norm(layers(token(tokens))));
  }
};
TORCH_MODULE(Model);

int train(Runtime& runtime) {
  torch::manual_seed(1);  // all ranks begin with the same weights
  Model model;
  libtorch::Trainer trainer(runtime, *model, {.tokens_per_sample = 64, .recompute = {"layers.*"}});
  const std::int64_t batch = runtime.config().micro_batch_size;
  for (int step = 1; step <= 60; ++step) {
    const StepResult result = trainer.step([&](int /*micro_batch*/) {
      const at::Tensor start = torch::arange(batch).unsqueeze(1) + batch * runtime.rank() + 5 * step;
      const at::Tensor text = (torch::arange(65).unsqueeze(0) + start).remainder(17);
      const at::Tensor logits = model->forward(text.slice(1, 0, 64)).to(torch::kFloat);
      return libtorch::Loss{
          at::cross_entropy_loss(logits.flatten(0, 1), text.slice(1, 1).flatten(), {}, at::Reduction::Sum),
          batch * 64};
    });
    if (runtime.rank() == 0 && step % 20 == 0) std::printf("step %d loss %.4f\n", step, result.loss);
  }
  return 0;
}

int main(int argc, char** argv) {
  Runtime runtime;
  try {
    runtime = Runtime::from_config(argc > 1 ? argv[1] : R"({"train_micro_batch_size_per_gpu": 4,
      "optimizer": {"type": "AdamW", "params": {"lr": 0.003}}, "zero_optimization": {"stage": 3}})");
    const auto account = libtorch::account_memory(runtime);  // torch's tensors in the ledger and its limit
    return train(runtime);
  } catch (...) {
    return runtime.fail(std::current_exception());
  }
}
