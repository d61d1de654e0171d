/// The time that a Trainer adds to a step of plain LibTorch with torch::optim::AdamW, on one rank in fp32.
/// Steps of both alternate, because ratios of neighbouring steps vary less than the times. See bench_libtorch
/// --help.
#include <tranche/libtorch.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "bench/figures.h"
#include "bench/flags.h"

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

struct Settings {
  std::string models = "10M,124M", stage = "3";
  int rounds = 15, threads = 0;
};

void compare(Runtime& runtime, const Size& size, int rounds) {
  torch::manual_seed(1);
  Model plain(size);
  torch::manual_seed(1);
  Model sharded(size);
  torch::optim::AdamW optimizer(plain->parameters(), torch::optim::AdamWOptions(1e-4).weight_decay(0.01));
  std::int64_t parameters = 0;
  for (const at::Tensor& p : plain->parameters()) parameters += p.numel();
  libtorch::Trainer trainer(runtime, *sharded, {.tokens_per_sample = size.tokens});
  const at::Tensor text = torch::randint(size.vocabulary, {1, size.tokens + 1});
  const auto of = [](const std::function<void()>& step) {
    const bench::Seconds begin = bench::clocks_now();
    step();
    return bench::clocks_now() - begin;
  };
  double loss_of_torch = 0, loss_of_trainer = 0;
  const auto torch_step = [&] {
    optimizer.zero_grad();
    const at::Tensor loss = plain->loss(text) / size.tokens;
    loss.backward();
    optimizer.step();
    loss_of_torch = loss.item<double>();
  };
  const auto trainer_step = [&] {
    loss_of_trainer = trainer.step([&](int) {
                               return libtorch::Loss{sharded->loss(text), size.tokens};
                             })
                          .loss;
  };
  for (int i = 0; i < 3; ++i) {  // the engine plans its memory in the second step
    torch_step();
    trainer_step();
  }
  std::vector<double> torchs, ours, wall, processor;
  for (int i = 0; i < rounds; ++i) {
    bench::Seconds a, b;
    if (i % 2 == 0) {
      a = of(torch_step);
      b = of(trainer_step);
    } else {
      b = of(trainer_step);
      a = of(torch_step);
    }
    torchs.push_back(a.wall);
    ours.push_back(b.wall);
    wall.push_back(b.wall / a.wall);
    processor.push_back(b.processor / a.processor);
  }
  std::printf(
      "model=%s parameters_m=%.1f tokens=%lld rounds=%d libtorch_ms=%.1f trainer_ms=%.1f "
      "trainer_of_libtorch=%.3f "
      "quartiles=%.3f..%.3f processor_trainer_of_libtorch=%.3f losses=%.6f,%.6f\n",
      size.name, double(parameters) / 1e6, static_cast<long long>(size.tokens), rounds,
      1e3 * bench::median(torchs), 1e3 * bench::median(ours), bench::median(wall),
      bench::quantile(wall, 0.25), bench::quantile(wall, 0.75), bench::median(processor), loss_of_torch,
      loss_of_trainer);
  std::fflush(stdout);
}

void measure(const Settings& settings) {
  Runtime runtime = Runtime::from_config(
      R"({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": )" + settings.stage +
      R"(}, "gradient_clipping": 0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
      "tranche": {"threads": )" +
      std::to_string(settings.threads) + "}}");
  at::set_num_threads(runtime.host_threads());
  const std::vector<Size> sizes{
      {"tiny", 64, 16, 2, 2, 16}, {"10M", 4096, 320, 7, 5, 256}, {"124M", 50257, 768, 12, 12, 256}};
  for (const std::string& name : bench::comma_list(settings.models)) {
    const auto size = std::find_if(sizes.begin(), sizes.end(), [&](const Size& s) { return s.name == name; });
    if (size == sizes.end()) throw ConfigurationError("--model " + name + " is not one of tiny, 10M, 124M");
    compare(runtime, *size, settings.rounds);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_program("bench_libtorch", [&] {
    Settings settings;
    bench::parse_flags(
        argc, argv,
        {bench::text_flag("--model", settings.models),
         bench::choice_flag("--stage", settings.stage, {"0", "1", "2", "3"}),
         bench::number_flag("--rounds", settings.rounds), bench::number_flag("--threads", settings.threads)});
    measure(settings);
  });
}
