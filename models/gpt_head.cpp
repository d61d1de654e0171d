#include "tranche/models/gpt_head.h"

#include <algorithm>

#include "tranche/engine/engine.h"
#include "tranche/kernels/cross_entropy.h"
#include "tranche/kernels/embedding.h"
#include "tranche/kernels/layer_norm.h"
#include "tranche/kernels/matmul.h"

namespace tranche::models {

namespace {

enum Parameter : int { token_table, position_table, ln_f_weight, ln_f_bias };

/// Rows [first, first + count) of a matrix.
template <typename View>
View rows_of(const View& matrix, std::int64_t first, std::int64_t count) {
  const std::int64_t columns = matrix.shape[1];
  return matrix.slice(first * columns, count * columns).reshaped({count, columns});
}

/// The vocabulary cut into chunks of columns.
struct Chunks {
  std::int64_t vocabulary, width;
  Chunks(std::int64_t vocabulary_size, std::int64_t wanted)
      : vocabulary(vocabulary_size),
        width(wanted > 0 ? std::min(wanted, vocabulary_size) : vocabulary_size) {}
  std::int64_t count() const { return divide_round_up(vocabulary, width); }
  std::int64_t first(std::int64_t chunk) const { return chunk * width; }
  std::int64_t columns(std::int64_t chunk) const { return std::min(width, vocabulary - first(chunk)); }
};

}  // namespace

UnitSpec gpt_embedding_unit(const GptConfig& config) {
  const auto normal = Initializer::normal(config.initializer_range);
  return {.name = "embedding",
          .tensors = {{"transformer.wte.weight", {config.vocabulary, config.width}, normal},
                      {"transformer.wpe.weight", {config.positions, config.width}, normal},
                      {"transformer.ln_f.weight", {config.width}, Initializer::ones()},
                      {"transformer.ln_f.bias", {config.width}, Initializer::zeros()}},
          .uses_per_pass = 2};
}

void gpt_embedding_forward(const GptPass& pass, const GatheredUnit& unit, const ConstTensorView& tokens,
                           const TensorView& out) {
  Stream& stream = pass.engine.compute_stream();
  kernels::embedding_forward(stream, tokens, unit.tensor(token_table), unit.tensor(position_table),
                             out.reshaped({pass.batch, pass.time, pass.config.width}));
  const auto options = pass.dropout(pass.config.embedding_dropout, 0);
  if (options.probability > 0) kernels::dropout(stream, options, out, out);
}

void gpt_embedding_backward(const GptPass& pass, const UnitGradients& gradients,
                            const ConstTensorView& tokens, const TensorView& gradient) {
  Stream& stream = pass.engine.compute_stream();
  const auto options = pass.dropout(pass.config.embedding_dropout, 0);
  if (options.probability > 0) kernels::dropout(stream, options, gradient, gradient);
  if (!gradients.wanted(token_table) && !gradients.wanted(position_table)) return;
  kernels::embedding_backward(stream, tokens, gradient.reshaped({pass.batch, pass.time, pass.config.width}),
                              gradients.tensor(token_table), gradients.tensor(position_table));
}

void gpt_head(const GptPass& pass, const GatheredUnit& unit, const UnitGradients* gradients,
              const ConstTensorView& x, const ConstTensorView& targets, const TensorView& loss_sum,
              const TensorView& token_count, const TensorView* d_x) {
  Engine& engine = pass.engine;
  Stream& stream = engine.compute_stream();
  const std::int64_t rows = pass.rows(), width = pass.config.width;
  const auto dtype = pass.dtype();
  const Chunks chunks(pass.config.vocabulary, engine.config().vocabulary_chunk);
  const ConstTensorView labels = targets.reshaped({rows});

  const StepTensors normed(
      engine, Category::activations, "final norm",
      {{dtype, {rows, width}}, {DataType::float32, {rows}}, {DataType::float32, {rows}}});
  kernels::layer_norm_forward(stream, x, unit.tensor(ln_f_weight), unit.tensor(ln_f_bias),
                              pass.config.layer_norm_epsilon, normed[0], normed[1], normed[2]);

  const StepTensors statistics(
      engine, Category::activations, "cross-entropy statistics",
      {{DataType::float32, {rows}}, {DataType::float32, {rows}}, {DataType::float32, {rows}}});
  const kernels::CrossEntropyState state{statistics[0], statistics[1], statistics[2]};
  StepTensors logits_memory(engine, Category::activations, "logits",
                            {{DataType::float32, {rows * chunks.width}}});
  const auto logits_of = [&](std::int64_t chunk) {
    return logits_memory[0].slice(0, rows * chunks.columns(chunk)).reshaped({rows, chunks.columns(chunk)});
  };
  const auto compute_logits = [&](std::int64_t chunk) {
    kernels::matmul(stream, {.transpose_b = true}, normed[0],
                    rows_of(unit.tensor(token_table), chunks.first(chunk), chunks.columns(chunk)),
                    logits_of(chunk), engine.workspace());
  };

  kernels::cross_entropy_begin(stream, state);
  for (std::int64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    compute_logits(chunk);
    kernels::cross_entropy_accumulate(stream, logits_of(chunk), labels, chunks.first(chunk), state);
  }
  kernels::cross_entropy_finish(stream, labels, state, loss_sum, token_count);
  if (gradients == nullptr) return;

  // fp32 gradients of the logits take the logits' place; 16-bit ones need memory of their own. With several
  // chunks the gradient of the normed rows is a sum over chunks, kept in fp32 until it is whole.
  const bool several = chunks.count() > 1, in_place = dtype == DataType::float32;
  const StepTensors d_normed_sum(engine, Category::activations, "head backward",
                                 {{dtype, {rows, width}},
                                  {DataType::float32, {several && !in_place ? rows : 0, width}},
                                  {dtype, {in_place ? 0 : rows * chunks.width}}});
  const TensorView& d_normed = d_normed_sum[0];
  const TensorView& summed = several && !in_place ? d_normed_sum[1] : d_normed;
  // From the last chunk, whose logits are still there, to the first.
  for (std::int64_t chunk = chunks.count() - 1; chunk >= 0; --chunk) {
    const bool begun = chunk != chunks.count() - 1;
    const std::int64_t first = chunks.first(chunk), columns = chunks.columns(chunk);
    if (begun) compute_logits(chunk);
    const TensorView d_logits =
        in_place ? logits_of(chunk) : d_normed_sum[2].slice(0, rows * columns).reshaped({rows, columns});
    kernels::cross_entropy_gradient(stream, logits_of(chunk), labels, first, state,
                                    engine.loss_gradient_scale(), d_logits);
    if (gradients->wanted(token_table)) {
      kernels::matmul(stream, {.transpose_a = true, .accumulate = true}, d_logits, normed[0],
                      rows_of(gradients->tensor(token_table), first, columns), engine.workspace());
    }
    kernels::matmul(stream, {.accumulate = begun}, d_logits,
                    rows_of(unit.tensor(token_table), first, columns), summed, engine.workspace());
  }
  logits_memory.release();
  if (several && !in_place) kernels::cast(stream, summed, d_normed);
  kernels::layer_norm_backward(stream, d_normed, x, unit.tensor(ln_f_weight), normed[1], normed[2], false,
                               *d_x, gradients->tensor(ln_f_weight), gradients->tensor(ln_f_bias),
                               engine.workspace());
}

void gpt_logits(const GptPass& pass, const GatheredUnit& unit, const ConstTensorView& x, std::int64_t first,
                std::int64_t count, const TensorView& logits) {
  Engine& engine = pass.engine;
  Stream& stream = engine.compute_stream();
  const StepTensors normed(engine, Category::activations, "final norm",
                           {{pass.dtype(), {count, pass.config.width}},
                            {DataType::float32, {count}},
                            {DataType::float32, {count}}});
  kernels::layer_norm_forward(stream, rows_of(x, first, count), unit.tensor(ln_f_weight),
                              unit.tensor(ln_f_bias), pass.config.layer_norm_epsilon, normed[0], normed[1],
                              normed[2]);
  kernels::matmul(stream, {.transpose_b = true}, normed[0], unit.tensor(token_table), logits,
                  engine.workspace());
}

}  // namespace tranche::models
