/// bench_libtorch [ROUNDS]: what a Trainer adds to a step of plain LibTorch with torch::optim::AdamW, on one
/// rank, at 10 M and 124 M parameters, fp32. Steps of both take turns; prints medians, and the median of the
/// ratios of neighbours.
#include <tranche/libtorch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

namespace {

using namespace tranche;

struct BlockImpl : torch::nn::Module {
  BlockImpl(std::int64_t width, std::int64_t h) : heads(h) {
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    mix = register_module("mix", torch::nn::Linear(width, 3 * width));
    out = register_module("out", torch::nn::Linear(width, width));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto part = mix(norm1(x)).unflatten(-1, {3, heads, -1}).permute({2, 0, 3, 1, 4});
    const at::Tensor y =
        at::scaled_dot_product_attention(part[0], part[1], part[2], {}, 0.0, /*is_causal=*/true);
    const at::Tensor z = x + out(y.transpose(1, 2).flatten(2));
    return z + down(torch::gelu(up(norm2(z))));
  }
  std::int64_t heads;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear mix{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct Size {
  const char* name;
  std::int64_t vocabulary, width, layers, heads, tokens;
};

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(const Size& s)
      : token(this, "token", s.vocabulary, s.width),
        layers(this, "layers", s.layers, s.width, s.heads),
        norm(this, "norm", torch::nn::LayerNormOptions({s.width})) {}
  at::Tensor loss(const at::Tensor& text) {
    const at::Tensor x = norm(layers(token(text.slice(1, 0, -1))));
    const at::Tensor logits =
        token.with([](auto& e, const at::Tensor& y) { return y.matmul(e->weight.t()); }, x);
    return at::cross_entropy_loss(logits.flatten(0, 1), text.slice(1, 1).flatten(), {}, at::Reduction::Sum);
  }
  libtorch::Unit<torch::nn::Embedding> token;
  libtorch::Units<Block> layers;
  libtorch::Unit<torch::nn::LayerNorm> norm;
};
TORCH_MODULE(Model);

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void compare(Runtime& runtime, const Size& size, int rounds) {
  torch::manual_seed(1);
  Model plain(size), sharded(size);
  torch::optim::AdamW optimizer(plain->parameters(), torch::optim::AdamWOptions(1e-4).weight_decay(0.01));
  std::int64_t parameters = 0;
  for (const at::Tensor& p : plain->parameters()) parameters += p.numel();
  libtorch::Trainer trainer(runtime, *sharded, {.tokens_per_sample = size.tokens});
  const at::Tensor text = torch::randint(size.vocabulary, {1, size.tokens + 1});
  const auto seconds = [](const std::function<void()>& step) {
    const auto begin = std::chrono::steady_clock::now();
    step();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  const auto of_torch = [&] {
    optimizer.zero_grad();
    (plain->loss(text) / size.tokens).backward();
    optimizer.step();
  };
  const auto of_tranche = [&] {
    trainer.step([&](int) { return libtorch::Loss{sharded->loss(text), size.tokens}; });
  };
  for (int i = 0; i < 3; ++i) of_torch(), of_tranche();
  std::vector<double> torchs, ours, ratios;
  for (int i = 0; i < rounds; ++i) {
    double a = 0, b = 0;
    if (i % 2 == 0) {
      a = seconds(of_torch);
      b = seconds(of_tranche);
    } else {
      b = seconds(of_tranche);
      a = seconds(of_torch);
    }
    torchs.push_back(a);
    ours.push_back(b);
    ratios.push_back(b / a);
  }
  std::printf(
      "%-6s %6.1f M parameters, %lld tokens, %d rounds: LibTorch %.1f ms, Trainer %.1f ms, ratio %.3f\n",
      size.name, double(parameters) / 1e6, static_cast<long long>(size.tokens), rounds, 1e3 * median(torchs),
      1e3 * median(ours), median(ratios));
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 15;
  Runtime runtime;
  try {
    runtime = Runtime::from_config(R"({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
      "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}}})");
    at::set_num_threads(runtime.host_threads());
    compare(runtime, {"small", 4096, 320, 7, 5, 256}, 3 * rounds);
    compare(runtime, {"gpt2", 50257, 768, 12, 12, 256}, rounds);
    return 0;
  } catch (...) {
    return runtime.fail(std::current_exception());
  }
}
