#pragma once
/// Networks as users of LibTorch write them, each with its own data, for tests of the adapter.

#include <tranche/libtorch.h>

#include <cmath>
#include <string>

namespace tranche::test {

namespace lt = libtorch;

/// A causal transformer with dropout and a tied embedding.
struct BlockImpl : torch::nn::Module {
  BlockImpl(std::int64_t width, double dropout) : drop(dropout) {
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    // There is no bias, because the gradient of the keys' bias is only rounding error, which Adam makes as
    // large as any.
    mix = register_module("mix", torch::nn::Linear(torch::nn::LinearOptions(width, 3 * width).bias(false)));
    out = register_module("out", torch::nn::Linear(width, width));
    up = register_module("up", torch::nn::Linear(width, 2 * width));
    down = register_module("down", torch::nn::Linear(2 * width, width));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto parts = mix(norm1(x)).chunk(3, -1);
    at::Tensor scores = parts[0].matmul(parts[1].transpose(-2, -1)) / std::sqrt(double(x.size(-1)));
    const at::Tensor later = torch::ones({x.size(1), x.size(1)}, torch::kBool).triu(1);
    scores = scores.masked_fill(later, -1e4);
    at::Tensor y = x + torch::dropout(out(torch::softmax(scores, -1).matmul(parts[2])), drop, is_training());
    return y + torch::dropout(down(torch::gelu(up(norm2(y)))), drop, is_training());
  }
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear mix{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
  double drop;
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  static constexpr std::int64_t vocabulary = 53, width = 24;
  explicit GptImpl(double dropout = 0)
      : token(this, "token", vocabulary, width),
        layers(this, "layers", 3, width, dropout),
        norm(this, "norm", torch::nn::LayerNormOptions({width})) {}
  GptImpl(lt::Deferred later, double dropout)
      : token(later, this, "token", vocabulary, width),
        layers(later, this, "layers", 3, width, dropout),
        norm(later, this, "norm", torch::nn::LayerNormOptions({width})) {}
  at::Tensor forward(const at::Tensor& tokens) {
    return token.with([](auto& e, const at::Tensor& x) { return 0.05 * x.matmul(e->weight.t()); },
                      norm(layers(token(tokens))));
  }
  lt::Unit<torch::nn::Embedding> token;
  lt::Units<Block> layers;
  lt::Unit<torch::nn::LayerNorm> norm;
};
TORCH_MODULE(Gpt);

/// The loss of samples [first, first + count) of an endless text.
inline lt::Loss loss_of(Gpt& model, std::int64_t first, std::int64_t count) {
  constexpr std::int64_t length = 16;
  const at::Tensor at = torch::arange(count * length).view({count, length}) + first * length;
  const at::Tensor text = (at * at * 7 + at * 3).remainder(Gpt::Impl::vocabulary);
  const at::Tensor logits = model->forward(text.slice(1, 0, length - 1)).to(torch::kFloat);
  return {torch::cross_entropy_loss(logits.reshape({-1, Gpt::Impl::vocabulary}),
                                    text.slice(1, 1, length).reshape(-1), {}, at::Reduction::Sum),
          count * (length - 1)};
}

/// Convolutions with batch norm, whose statistics are buffers, and in-place activations.
struct ConvolutionsImpl : torch::nn::Module {
  struct StageImpl : torch::nn::Module {
    StageImpl(std::int64_t in, std::int64_t out) {
      conv = register_module("conv",
                             torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1).bias(false)));
      norm = register_module("norm", torch::nn::BatchNorm2d(out));
    }
    at::Tensor forward(const at::Tensor& x) { return norm(conv(x)); }
    torch::nn::Conv2d conv{nullptr};
    torch::nn::BatchNorm2d norm{nullptr};
  };
  TORCH_MODULE(Stage);
  ConvolutionsImpl()
      : first(this, "first", 1, 5), second(this, "second", 5, 7), head(this, "head", 7 * 9, 4) {}
  explicit ConvolutionsImpl(double) : ConvolutionsImpl() {}
  at::Tensor forward(const at::Tensor& image) {
    at::Tensor x = torch::max_pool2d(first(image).relu_(), 2);
    x = second(x).relu_();
    return head(x.flatten(1));
  }
  lt::Unit<Stage> first, second;
  lt::Unit<torch::nn::Linear> head;
};
TORCH_MODULE(Convolutions);

inline lt::Loss loss_of(Convolutions& model, std::int64_t first, std::int64_t count) {
  const at::Tensor at = torch::arange(count * 36).view({count, 1, 6, 6}) + first * 36;
  const at::Tensor image = torch::sin(at.to(torch::kFloat) * 0.37f);
  const at::Tensor kind = (torch::arange(count) + first).remainder(4);
  return {torch::cross_entropy_loss(model->forward(image), kind, {}, at::Reduction::Sum), count};
}

/// Chooses one of two layers by the sample, so that ranks leave different parameters unused. One parameter is
/// used by no rank, one is frozen, and one unit is not called.
struct ChoosingImpl : torch::nn::Module {
  struct EitherImpl : torch::nn::Module {
    EitherImpl() {
      even = register_module("even", torch::nn::Linear(6, 6));
      odd = register_module("odd", torch::nn::Linear(6, 6));
      never = register_parameter("never", torch::ones({3}));
      scale = register_parameter("scale", torch::full({6}, 1.5f), /*requires_grad=*/false);
    }
    at::Tensor forward(const at::Tensor& x, bool is_even) {
      return torch::tanh(is_even ? even(x) : odd(x)) * scale;
    }
    torch::nn::Linear even{nullptr}, odd{nullptr};
    at::Tensor never, scale;
  };
  TORCH_MODULE(Either);
  ChoosingImpl()
      : in(this, "in", 6, 6),
        either(this, "either"),
        extra(this, "extra", 6, 6),
        idle(this, "idle", 3, 2),
        out(this, "out", 6, 1) {}
  explicit ChoosingImpl(double) : ChoosingImpl() {}
  at::Tensor forward(const at::Tensor& x, bool is_even) {
    const at::Tensor y = either(torch::relu(in(x)), is_even);
    const at::Tensor z = extra(y);  // all ranks call it; on some it contributes to the loss
    return out(is_even ? y : y + z);
  }
  lt::Unit<torch::nn::Linear> in;
  lt::Unit<Either> either;
  lt::Unit<torch::nn::Linear> extra, idle, out;
};
TORCH_MODULE(Choosing);

inline lt::Loss loss_of(Choosing& model, std::int64_t first, std::int64_t count) {
  const at::Tensor at = torch::arange(count * 6).view({count, 6}) + first * 6;
  const at::Tensor x = torch::sin(at.to(torch::kFloat) * 0.71f);
  const at::Tensor wrong = model->forward(x, first / count % 2 == 0) - 0.2 * x.sum(1, true);
  return {0.25 * (wrong * wrong).sum(), count};
}

/// Units inside units: the inner one is called twice in the outer one's forward.
struct NestedImpl : torch::nn::Module {
  struct OuterImpl : torch::nn::Module {
    OuterImpl() : inner(this, "inner", 8, 8) {
      before = register_module("before", torch::nn::Linear(8, 8));
      after = register_module("after", torch::nn::Linear(8, 8));
    }
    at::Tensor forward(const at::Tensor& x) {
      return after(torch::tanh(inner(torch::tanh(inner(before(x))))));
    }
    lt::Unit<torch::nn::Linear> inner;
    torch::nn::Linear before{nullptr}, after{nullptr};
  };
  TORCH_MODULE(Outer);
  NestedImpl() : outers(this, "outers", 2), out(this, "out", 8, 1) {}
  explicit NestedImpl(double) : NestedImpl() {}
  at::Tensor forward(const at::Tensor& x) { return out(outers(x)); }
  lt::Units<Outer> outers;
  lt::Unit<torch::nn::Linear> out;
};
TORCH_MODULE(Nested);

inline lt::Loss loss_of(Nested& model, std::int64_t first, std::int64_t count) {
  const at::Tensor at = torch::arange(count * 8).view({count, 8}) + first * 8;
  const at::Tensor x = torch::sin(at.to(torch::kFloat) * 0.53f);
  const at::Tensor wrong = model->forward(x) - 0.2 * x.sum(1, true);
  return {0.25 * (wrong * wrong).sum(), count};
}

}  // namespace tranche::test
