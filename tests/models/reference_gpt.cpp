#include <string>

#include "kernels/reference/attention.h"
#include "kernels/reference/cross_entropy.h"
#include "kernels/reference/embedding.h"
#include "kernels/reference/layer_norm.h"
#include "kernels/reference/matmul.h"
#include "reference_models.h"

namespace tranche::reference_training {

namespace {

namespace plain = kernels::reference;

struct Norm {
  Tensor y, mean, rstd;
};

struct Block {
  Tensor input, query_key_value, attended, attention_residual, hidden, activated;
  Norm norm_1, norm_2;
  Tensor probability_mask, attention_mask, mlp_mask;  // empty without dropout
};

/// x *= mask, if the mask is not empty.
void multiply(Tensor& x, const Tensor& mask) {
  for (std::size_t i = 0; i < mask.size(); ++i) x[i] *= mask[i];
}

/// One evaluation of the model; weights and gradients have Hugging Face's names.
class Evaluation {
 public:
  Evaluation(const models::GptConfig& config, const Tensors& weights, std::int64_t batch, std::int64_t time,
             const DropoutMasks& masks)
      : config_(config),
        weights_(weights),
        rows_(batch * time),
        attention_{.batch = batch,
                   .time = time,
                   .heads = config.heads,
                   .key_value_heads = config.heads,
                   .head_width = config.width / config.heads,
                   .document_begin = {}},
        masks_(masks) {}

  LossSum forward(std::span<const std::int32_t> tokens, std::span<const std::int32_t> targets) {
    Tensor x(size(config_.width));
    plain::embedding_forward(attention_.time, config_.width, tokens, weight("wte.weight"),
                             weight("wpe.weight"), x);
    embedding_mask_ = mask(0, rows_ * config_.width);
    multiply(x, embedding_mask_);
    for (std::int64_t i = 0; i < config_.layers; ++i) x = block_forward(i, std::move(x));
    last_ = std::move(x);
    final_ = norm(last_, "ln_f");
    logits_.assign(size(config_.vocabulary), 0.0);
    plain::matmul({.m = rows_, .n = config_.vocabulary, .k = config_.width, .transpose_b = true}, final_.y,
                  weight("wte.weight"), false, logits_);
    const auto result = plain::cross_entropy_forward(config_.vocabulary, logits_, targets);
    return {result.loss_sum, result.tokens};
  }

  void backward(std::span<const std::int32_t> tokens, std::span<const std::int32_t> targets,
                Tensors& gradients) {
    gradients_ = &gradients;
    Tensor d_logits(logits_.size()), d_final(final_.y.size());
    plain::cross_entropy_backward(config_.vocabulary, logits_, targets, 1.0, d_logits);
    plain::matmul({.m = config_.vocabulary, .n = config_.width, .k = rows_, .transpose_a = true}, d_logits,
                  final_.y, true, gradient("wte.weight"));
    plain::matmul({.m = rows_, .n = config_.width, .k = config_.vocabulary}, d_logits, weight("wte.weight"),
                  false, d_final);
    Tensor d_x(d_final.size(), 0.0);
    norm_backward(d_final, last_, final_, "ln_f", d_x);
    for (std::int64_t i = config_.layers - 1; i >= 0; --i) block_backward(i, d_x);
    multiply(d_x, embedding_mask_);
    plain::embedding_backward(attention_.time, config_.width, tokens, d_x, gradient("wte.weight"),
                              gradient("wpe.weight"));
  }

 private:
  std::size_t size(std::int64_t columns) const { return static_cast<std::size_t>(rows_ * columns); }
  const Tensor& weight(const std::string& name) const { return weights_.at("transformer." + name); }
  Tensor& gradient(const std::string& name) { return gradients_->at("transformer." + name); }

  Tensor mask(std::int64_t site, std::int64_t elements) const {
    return masks_ ? masks_(static_cast<std::uint32_t>(site), elements) : Tensor{};
  }

  Norm norm(const Tensor& x, const std::string& name) const {
    Norm result{Tensor(x.size()), Tensor(size(1)), Tensor(size(1))};
    plain::layer_norm_forward(rows_, config_.width, x, weight(name + ".weight"), weight(name + ".bias"),
                              config_.layer_norm_epsilon, result.y, result.mean, result.rstd);
    return result;
  }
  /// Adds to d_x.
  void norm_backward(const Tensor& d_y, const Tensor& x, const Norm& norm, const std::string& name,
                     Tensor& d_x) {
    plain::layer_norm_backward(rows_, config_.width, d_y, x, weight(name + ".weight"), norm.mean, norm.rstd,
                               true, d_x, gradient(name + ".weight"), gradient(name + ".bias"));
  }
  void apply(const Tensor& x, const std::string& name, Tensor& out) const {
    linear(rows_, x, weight(name + ".weight"), weight(name + ".bias"), out);
  }
  void apply_backward(const Tensor& x, const std::string& name, const Tensor& d_out, Tensor& d_x) {
    linear_backward(rows_, x, weight(name + ".weight"), d_out, gradient(name + ".weight"),
                    gradient(name + ".bias"), &d_x);
  }

  Tensor block_forward(std::int64_t index, Tensor input) {
    const std::string name = "h." + std::to_string(index) + ".";
    Block& block = blocks_.emplace_back();
    block.input = std::move(input);
    block.norm_1 = norm(block.input, name + "ln_1");
    apply(block.norm_1.y, name + "attn.c_attn", block.query_key_value);
    block.probability_mask = mask(1 + 3 * index, rows_ * attention_.time * config_.heads);
    block.attention_mask = mask(2 + 3 * index, rows_ * config_.width);
    block.mlp_mask = mask(3 + 3 * index, rows_ * config_.width);
    block.attended.resize(size(config_.width));
    Tensor log_sum_exp(size(config_.heads));
    plain::attention_forward(attention_, plain::packed<const double>(block.query_key_value, config_.width),
                             block.probability_mask, block.attended, log_sum_exp);
    apply(block.attended, name + "attn.c_proj", block.attention_residual);
    multiply(block.attention_residual, block.attention_mask);
    for (std::size_t i = 0; i < block.attention_residual.size(); ++i)
      block.attention_residual[i] += block.input[i];
    block.norm_2 = norm(block.attention_residual, name + "ln_2");
    apply(block.norm_2.y, name + "mlp.c_fc", block.hidden);
    gelu(block.hidden, block.activated);
    Tensor output;
    apply(block.activated, name + "mlp.c_proj", output);
    multiply(output, block.mlp_mask);
    for (std::size_t i = 0; i < output.size(); ++i) output[i] += block.attention_residual[i];
    return output;
  }

  void block_backward(std::int64_t index, Tensor& d_x) {
    const std::string name = "h." + std::to_string(index) + ".";
    const Block& block = blocks_[static_cast<std::size_t>(index)];
    Tensor d_hidden, d_normed, d_attended, d_query_key_value(block.query_key_value.size());
    Tensor d_out = d_x;
    multiply(d_out, block.mlp_mask);
    apply_backward(block.activated, name + "mlp.c_proj", d_out, d_hidden);
    gelu_backward(block.hidden, d_hidden);
    apply_backward(block.norm_2.y, name + "mlp.c_fc", d_hidden, d_normed);
    norm_backward(d_normed, block.attention_residual, block.norm_2, name + "ln_2", d_x);
    d_out = d_x;
    multiply(d_out, block.attention_mask);
    apply_backward(block.attended, name + "attn.c_proj", d_out, d_attended);
    plain::attention_backward(
        attention_, d_attended, plain::packed<const double>(block.query_key_value, config_.width),
        block.probability_mask, plain::packed<double>(d_query_key_value, config_.width));
    apply_backward(block.norm_1.y, name + "attn.c_attn", d_query_key_value, d_normed);
    norm_backward(d_normed, block.input, block.norm_1, name + "ln_1", d_x);
  }

  const models::GptConfig& config_;
  const Tensors& weights_;
  Tensors* gradients_ = nullptr;
  std::int64_t rows_;
  plain::AttentionShape attention_;
  const DropoutMasks& masks_;
  Tensor embedding_mask_;
  std::vector<Block> blocks_;
  Tensor last_, logits_;
  Norm final_;
};

}  // namespace

LossSum gpt(const models::GptConfig& config, const Tensors& weights, std::span<const std::int32_t> tokens,
            std::span<const std::int32_t> targets, std::int64_t time, Tensors* gradients,
            const DropoutMasks& masks) {
  Evaluation evaluation(config, weights, static_cast<std::int64_t>(tokens.size()) / time, time, masks);
  const LossSum loss = evaluation.forward(tokens, targets);
  if (gradients != nullptr) evaluation.backward(tokens, targets, *gradients);
  return loss;
}

}  // namespace tranche::reference_training
