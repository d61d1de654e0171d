#include "reference_llama.h"

#include <string>
#include <utility>

#include "kernels/reference/attention.h"
#include "kernels/reference/cross_entropy.h"
#include "kernels/reference/matmul.h"
#include "kernels/reference/rms_norm.h"
#include "kernels/reference/rope.h"
#include "kernels/reference/swiglu.h"
#include "tranche/kernels/rope.h"

namespace tranche::reference_training {

namespace {

namespace plain = kernels::reference;

struct RmsNorm {
  Tensor x, y, rstd;
};

struct LlamaBlock {
  Tensor input, attention_residual, value, attended, gate, up, activated;
  RmsNorm norm_1, norm_2, query, key;  // of queries and keys: x before the norm, y as attention reads them
};

/// One evaluation of the model; weights and gradients have Hugging Face's names.
class LlamaEvaluation {
 public:
  LlamaEvaluation(const models::LlamaConfig& config, const Tensors& weights, const LlamaRows& batch)
      : config_(config),
        weights_(weights),
        batch_(batch),
        rows_(static_cast<std::int64_t>(batch.tokens.size())),
        attention_{.batch = rows_ / batch.time,
                   .time = batch.time,
                   .heads = config.heads,
                   .key_value_heads = config.key_value_heads,
                   .head_width = config.head_dim,
                   .document_begin = batch.document_begin} {
    const auto frequencies = kernels::rope_frequencies(config.head_dim, config.rope_theta, config.rope);
    std::vector<std::int64_t> positions(batch.positions.begin(), batch.positions.end());
    for (std::int64_t row = 0; positions.size() < batch.tokens.size(); ++row)
      positions.push_back(row % batch.time);
    table_.resize(size(config.head_dim));
    plain::rope_table(Tensor(frequencies.begin(), frequencies.end()), positions, table_);
  }

  LossSum forward() {
    const Tensor& table = weight("model.embed_tokens.weight");
    const auto width = static_cast<std::size_t>(config_.width);
    Tensor x;
    for (const std::int32_t token : batch_.tokens) {
      const auto first = table.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(token) * width);
      x.insert(x.end(), first, first + config_.width);
    }
    for (std::int64_t i = 0; i < config_.layers; ++i) x = block_forward(i, std::move(x));
    final_ = norm(std::move(x), "model.norm", config_.width);
    logits_.assign(size(config_.vocabulary), 0.0);
    plain::matmul({.m = rows_, .n = config_.vocabulary, .k = config_.width, .transpose_b = true}, final_.y,
                  weight(head()), false, logits_);
    const auto result = plain::cross_entropy_forward(config_.vocabulary, logits_, batch_.targets);
    return {result.loss_sum, result.tokens};
  }

  void backward(Tensors& gradients) {
    gradients_ = &gradients;
    Tensor d_logits(logits_.size()), d_final(final_.y.size());
    plain::cross_entropy_backward(config_.vocabulary, logits_, batch_.targets, 1.0, d_logits);
    plain::matmul({.m = config_.vocabulary, .n = config_.width, .k = rows_, .transpose_a = true}, d_logits,
                  final_.y, true, gradient(head()));
    plain::matmul({.m = rows_, .n = config_.width, .k = config_.vocabulary}, d_logits, weight(head()), false,
                  d_final);
    Tensor d_x(d_final.size(), 0.0);
    norm_backward(d_final, final_, "model.norm", config_.width, d_x);
    for (std::int64_t i = config_.layers - 1; i >= 0; --i) block_backward(i, d_x);
    Tensor& table = gradient("model.embed_tokens.weight");
    for (std::size_t i = 0; i < d_x.size(); ++i) {
      const auto width = static_cast<std::size_t>(config_.width);
      table[static_cast<std::size_t>(batch_.tokens[i / width]) * width + i % width] += d_x[i];
    }
  }

 private:
  std::size_t size(std::int64_t columns) const { return static_cast<std::size_t>(rows_ * columns); }
  const Tensor& weight(const std::string& name) const { return weights_.at(name); }
  Tensor& gradient(const std::string& name) { return gradients_->at(name); }
  std::string head() const { return config_.tied ? "model.embed_tokens.weight" : "lm_head.weight"; }

  RmsNorm norm(Tensor x, const std::string& name, std::int64_t width) const {
    const auto rows = static_cast<std::int64_t>(x.size()) / width;
    RmsNorm result{std::move(x), {}, Tensor(static_cast<std::size_t>(rows))};
    result.y.resize(result.x.size());
    plain::rms_norm_forward(rows, width, result.x, weight(name + ".weight"), config_.norm_epsilon, result.y,
                            result.rstd);
    return result;
  }
  /// Adds to d_x.
  void norm_backward(const Tensor& d_y, const RmsNorm& norm, const std::string& name, std::int64_t width,
                     Tensor& d_x) {
    plain::rms_norm_backward(static_cast<std::int64_t>(d_y.size()) / width, width, d_y, norm.x,
                             weight(name + ".weight"), norm.rstd, true, d_x, gradient(name + ".weight"));
  }
  /// x W^T + b, with W stored [out, in], and with b if the model has biases.
  Tensor apply(const Tensor& x, const std::string& name) const {
    const Tensor& w = weight(name + ".weight");
    const std::int64_t in = static_cast<std::int64_t>(x.size()) / rows_,
                       out = static_cast<std::int64_t>(w.size()) / in;
    Tensor y(size(out), 0.0);
    const auto bias = weights_.find(name + ".bias");
    if (bias != weights_.end()) {
      for (std::size_t i = 0; i < y.size(); ++i) y[i] = bias->second[i % bias->second.size()];
    }
    plain::matmul({.m = rows_, .n = out, .k = in, .transpose_b = true}, x, w, true, y);
    return y;
  }
  /// Adds to d_x.
  void apply_backward(const Tensor& x, const std::string& name, const Tensor& d_y, Tensor& d_x) {
    const std::int64_t in = static_cast<std::int64_t>(x.size()) / rows_,
                       out = static_cast<std::int64_t>(d_y.size()) / rows_;
    plain::matmul({.m = out, .n = in, .k = rows_, .transpose_a = true}, d_y, x, true,
                  gradient(name + ".weight"));
    if (weights_.contains(name + ".bias")) {
      Tensor& bias = gradient(name + ".bias");
      for (std::size_t i = 0; i < d_y.size(); ++i) bias[i % bias.size()] += d_y[i];
    }
    d_x.resize(x.size(), 0.0);
    plain::matmul({.m = rows_, .n = in, .k = out}, d_y, weight(name + ".weight"), true, d_x);
  }

  /// Queries or keys as attention reads them.
  RmsNorm rotated(Tensor projected, const std::string& norm_name, std::int64_t heads) const {
    RmsNorm result{projected, std::move(projected), {}};
    if (config_.query_key_norm()) result = norm(std::move(result.x), norm_name, config_.head_dim);
    plain::rope(false, table_, config_.head_dim, heads, config_.head_dim, result.y);
    return result;
  }
  Tensor rotated_backward(Tensor d_y, const RmsNorm& of, const std::string& norm_name, std::int64_t heads) {
    plain::rope(true, table_, config_.head_dim, heads, config_.head_dim, d_y);
    if (!config_.query_key_norm()) return d_y;
    Tensor d_x(d_y.size(), 0.0);
    norm_backward(d_y, of, norm_name, config_.head_dim, d_x);
    return d_x;
  }
  template <class T>
  plain::QueryKeyValue<T> heads_of(std::span<T> query, std::span<T> key, std::span<T> value) const {
    return {
        {query, config_.query_width()}, {key, config_.key_value_width()}, {value, config_.key_value_width()}};
  }

  Tensor block_forward(std::int64_t index, Tensor input) {
    const std::string name = "model.layers." + std::to_string(index) + ".", self = name + "self_attn.";
    LlamaBlock& block = blocks_.emplace_back();
    block.input = std::move(input);
    block.norm_1 = norm(block.input, name + "input_layernorm", config_.width);
    block.query = rotated(apply(block.norm_1.y, self + "q_proj"), self + "q_norm", config_.heads);
    block.key = rotated(apply(block.norm_1.y, self + "k_proj"), self + "k_norm", config_.key_value_heads);
    block.value = apply(block.norm_1.y, self + "v_proj");
    block.attended.resize(block.query.y.size());
    Tensor log_sum_exp(size(config_.heads));
    attention_.window = config_.window_of(index);
    plain::attention_forward(attention_, heads_of<const double>(block.query.y, block.key.y, block.value), {},
                             block.attended, log_sum_exp);
    block.attention_residual = apply(block.attended, self + "o_proj");
    for (std::size_t i = 0; i < block.input.size(); ++i) block.attention_residual[i] += block.input[i];
    block.norm_2 = norm(block.attention_residual, name + "post_attention_layernorm", config_.width);
    block.gate = apply(block.norm_2.y, name + "mlp.gate_proj");
    block.up = apply(block.norm_2.y, name + "mlp.up_proj");
    block.activated.resize(block.gate.size());
    plain::swiglu_forward(block.gate, block.up, block.activated);
    Tensor output = apply(block.activated, name + "mlp.down_proj");
    for (std::size_t i = 0; i < output.size(); ++i) output[i] += block.attention_residual[i];
    return output;
  }

  void block_backward(std::int64_t index, Tensor& d_x) {
    const std::string name = "model.layers." + std::to_string(index) + ".", self = name + "self_attn.";
    const LlamaBlock& block = blocks_[static_cast<std::size_t>(index)];
    Tensor d_activated, d_gate(block.gate.size()), d_up(block.up.size()), d_normed, d_attended;
    apply_backward(block.activated, name + "mlp.down_proj", d_x, d_activated);
    plain::swiglu_backward(block.gate, block.up, d_activated, d_gate, d_up);
    apply_backward(block.norm_2.y, name + "mlp.gate_proj", d_gate, d_normed);
    apply_backward(block.norm_2.y, name + "mlp.up_proj", d_up, d_normed);
    norm_backward(d_normed, block.norm_2, name + "post_attention_layernorm", config_.width, d_x);

    apply_backward(block.attended, self + "o_proj", d_x, d_attended);
    Tensor d_query(block.query.y.size()), d_key(block.key.y.size()), d_value(block.value.size());
    attention_.window = config_.window_of(index);
    plain::attention_backward(attention_, d_attended,
                              heads_of<const double>(block.query.y, block.key.y, block.value), {},
                              heads_of<double>(d_query, d_key, d_value));
    d_query = rotated_backward(std::move(d_query), block.query, self + "q_norm", config_.heads);
    d_key = rotated_backward(std::move(d_key), block.key, self + "k_norm", config_.key_value_heads);
    d_normed.assign(d_normed.size(), 0.0);
    apply_backward(block.norm_1.y, self + "q_proj", d_query, d_normed);
    apply_backward(block.norm_1.y, self + "k_proj", d_key, d_normed);
    apply_backward(block.norm_1.y, self + "v_proj", d_value, d_normed);
    norm_backward(d_normed, block.norm_1, name + "input_layernorm", config_.width, d_x);
  }

  const models::LlamaConfig& config_;
  const Tensors& weights_;
  const LlamaRows& batch_;
  Tensors* gradients_ = nullptr;
  std::int64_t rows_;
  plain::AttentionShape attention_;
  Tensor table_;
  std::vector<LlamaBlock> blocks_;
  Tensor logits_;
  RmsNorm final_;
};

}  // namespace

LossSum llama(const models::LlamaConfig& config, const Tensors& weights, const LlamaRows& batch,
              Tensors* gradients) {
  LlamaEvaluation evaluation(config, weights, batch);
  const LossSum loss = evaluation.forward();
  if (gradients != nullptr) evaluation.backward(*gradients);
  return loss;
}

}  // namespace tranche::reference_training
