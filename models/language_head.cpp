#include "models/language_head.h"

#include <algorithm>
#include <optional>
#include <string>

#include "models/chained_sums.h"
#include "models/low_rank.h"
#include "tranche/engine/engine.h"
#include "tranche/kernels/cross_entropy.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/matmul.h"
#include "tranche/kernels/matmul_rows.h"
#include "tranche/models/tensor_rows.h"

namespace tranche::models {

namespace {

/// Rows [first, first + count) of a matrix.
template <typename View>
View rows_of(const View& matrix, std::int64_t first, std::int64_t count) {
  const std::int64_t columns = matrix.shape[1];
  return matrix.slice(first * columns, count * columns).reshaped({count, columns});
}

/// The vocabulary, or this rank's part of it, in blocks of columns. Each block is multiplied, exponentiated
/// and summed separately, one after another. The blocks depend only on these columns; the logits of
/// `resident` blocks are in memory at once, which does not affect bits.
struct Blocks {
  std::int64_t vocabulary, count, resident;
  Blocks(std::int64_t vocabulary_size, std::int64_t chunk)
      : vocabulary(vocabulary_size),
        count(divide_round_up(vocabulary, head_block_columns)),
        resident(chunk > 0 ? std::min(divide_round_up(std::min(chunk, vocabulary), head_block_columns), count)
                           : count) {}
  std::int64_t first(std::int64_t block) const { return block * head_block_columns; }
  std::int64_t columns(std::int64_t block) const {
    return std::min(head_block_columns, vocabulary - first(block));
  }
  /// Columns of the blocks whose logits are in memory at once.
  std::int64_t resident_columns() const { return std::min(resident * head_block_columns, vocabulary); }
  /// The column at which a block's logits begin.
  std::int64_t place(std::int64_t block) const { return block % resident * head_block_columns; }
};

/// Softmax statistics if the axis `tensor` divides the vocabulary: those of all ranks are stored side by
/// side, [ranks][3][rows], and this rank's own are written in place.
class RankStatistics {
 public:
  explicit RankStatistics(const Pass& pass)
      : pass_(pass),
        memory_(pass.engine, Category::activations, "cross-entropy statistics of ranks",
                {{DataType::float32, {pass.tensor_ranks(), 3, pass.rows()}}}) {}
  kernels::CrossEntropyState own() const { return {row(0), row(1), row(2)}; }
  /// Sets `state` to the statistics of all columns. Collective over the axis.
  void combine(const kernels::CrossEntropyState& state) const {
    Stream& stream = pass_.engine.compute_stream();
    gather_from_ranks(pass_, "cross-entropy statistics", row(0).data, memory_[0].data, 3 * pass_.rows(),
                      DataType::float32);
    kernels::cross_entropy_combine(stream, memory_[0], state);
  }

 private:
  TensorView row(std::int64_t which) const {
    return memory_[0].slice((pass_.tensor_rank() * std::int64_t{3} + which) * pass_.rows(), pass_.rows());
  }
  const Pass& pass_;
  StepTensors memory_;
};

/// Memory for the final norm of `rows` rows.
StepTensors acquire_final_norm(const Pass& pass, std::int64_t rows) {
  return {
      pass.engine,
      Category::activations,
      "final norm",
      {{pass.dtype(), {rows, pass.shape.width}}, {DataType::float32, {rows}}, {DataType::float32, {rows}}}};
}

FinalNorm final_norm(const StepTensors& memory) {
  return {memory[0], memory[1], memory[2]};
}

/// The head's rows of a [vocabulary, width] that this rank computes.
ConstTensorView head_weight(const Pass& pass, const GatheredUnit& unit) {
  return pass.own_tokens(unit.tensor(pass.shape.head_weight));
}

}  // namespace

std::optional<LowRank> head_adapter(const Pass& pass, const GatheredUnit& unit) {
  std::optional<LowRank> low_rank = LowRank::of(pass.engine, unit, pass.shape.head_weight);
  if (low_rank) low_rank->set_b(pass.own_tokens(low_rank->b()));
  return low_rank;
}

GradientTarget target_of_own(const Pass& pass, const UnitGradients& gradients, int tensor) {
  if (pass.tensor == nullptr || !pass.engine.config().leaves_whole("vocabulary")) {
    return gradients.target(tensor);
  }
  return {pass.own_tokens(gradients.tensor(tensor)), true};
}

void language_head(const LanguageModel& model, const Pass& pass, const GatheredUnit& unit,
                   const UnitGradients* gradients, const ConstTensorView& x, const ConstTensorView& targets,
                   const TensorView& loss_sum, const TensorView& token_count, const TensorView* d_x) {
  if (pass.chained()) {
    return chained_language_head(model, pass, unit, gradients, x, targets, loss_sum, token_count, d_x);
  }
  Engine& engine = pass.engine;
  Stream& stream = engine.compute_stream();
  const std::int64_t rows = pass.rows(), width = pass.shape.width;
  const auto dtype = pass.dtype();
  const int weight = pass.shape.head_weight;
  const DimensionPart vocabulary = pass.part_of(pass.shape.vocabulary);
  const Blocks blocks(vocabulary.count, engine.config().vocabulary_chunk);
  const ConstTensorView labels = targets.reshaped({rows}), table = head_weight(pass, unit);
  const std::string& name = unit.spec().name;

  const StepTensors norm_memory = acquire_final_norm(pass, pass.local_rows());
  const FinalNorm norm = final_norm(norm_memory);
  model.final_norm_forward(pass, unit, x, norm);
  const GatheredRows normed_rows(pass, name, norm.normed);
  const ConstTensorView& normed = normed_rows.view();

  const StepTensors statistics(
      engine, Category::activations, "cross-entropy statistics",
      {{DataType::float32, {rows}}, {DataType::float32, {rows}}, {DataType::float32, {rows}}});
  const kernels::CrossEntropyState state{statistics[0], statistics[1], statistics[2]};
  StepTensors logits_memory(engine, Category::activations, "logits",
                            {{DataType::float32, {rows * blocks.resident_columns()}}});
  const auto part_of = [&](const TensorView& memory, std::int64_t place, std::int64_t block) {
    const std::int64_t columns = blocks.columns(block);
    return memory.slice(rows * place, rows * columns).reshaped({rows, columns});
  };
  const auto logits_of = [&](std::int64_t block) {
    return part_of(logits_memory[0], blocks.place(block), block);
  };
  // The head's adapter computes its narrow product once for all blocks; each block uses its rows of B.
  const std::optional<LowRank> low_rank = head_adapter(pass, unit);
  StepTensors inner;
  if (low_rank) {
    inner = StepTensors(engine, Category::activations, "adapter", {{dtype, {rows, low_rank->rank()}}});
    low_rank->inner(normed, inner[0]);
  }
  const auto compute_logits = [&](std::int64_t block) {
    const std::int64_t first = blocks.first(block), columns = blocks.columns(block);
    kernels::matmul(stream, {.transpose_b = true}, normed, rows_of(table, first, columns), logits_of(block),
                    engine.workspace());
    if (!low_rank) return;
    kernels::matmul(stream, {.transpose_b = true, .accumulate = true}, inner[0],
                    rows_of(low_rank->b(), first, columns), logits_of(block), engine.workspace());
  };

  {
    std::optional<RankStatistics> of_ranks;
    if (pass.tensor != nullptr) of_ranks.emplace(pass);
    const kernels::CrossEntropyState own = of_ranks ? of_ranks->own() : state;
    kernels::cross_entropy_begin(stream, own);
    for (std::int64_t block = 0; block < blocks.count; ++block) {
      compute_logits(block);
      kernels::cross_entropy_accumulate(stream, logits_of(block), labels,
                                        vocabulary.first + blocks.first(block), own);
    }
    if (of_ranks) of_ranks->combine(state);
  }
  kernels::cross_entropy_finish(stream, labels, state, loss_sum, token_count);
  if (gradients == nullptr) return;

  // fp32 gradients of the logits overwrite the logits; 16-bit ones need separate memory, for one block. With
  // several blocks the gradient of the normed rows is a sum over blocks, in fp32 until it is complete.
  const bool several = blocks.count > 1, in_place = dtype == DataType::float32;
  const StepTensors scratch(engine, Category::activations, "head backward",
                            {{dtype, {pass.local_rows(), width}},
                             {DataType::float32, {several && !in_place ? rows : 0, width}},
                             {dtype, {in_place ? 0 : rows * blocks.columns(0)}}});
  PartialRows partial(pass, scratch[0]);
  const TensorView d_normed = partial.view();
  const TensorView summed = several && !in_place ? scratch[1] : d_normed;
  // Each block writes different rows.
  const bool wanted = gradients->wanted(weight);
  const GradientTarget d_table = wanted ? target_of_own(pass, *gradients, weight) : GradientTarget{};
  StepTensors inner_backward;  // the sum over blocks in fp32, and its value in the compute dtype
  GradientTarget d_b;
  if (low_rank) {
    const Shape narrow_rows{rows, low_rank->rank()};
    inner_backward =
        StepTensors(engine, Category::activations, "adapter backward",
                    {{DataType::float32, narrow_rows}, {dtype, {in_place ? 0 : rows, low_rank->rank()}}});
    d_b = target_of_own(pass, *gradients, low_rank->adapter().b);
  }
  const auto backward = [&](std::int64_t block) {
    const std::int64_t first = blocks.first(block), columns = blocks.columns(block);
    const TensorView d_logits = in_place ? logits_of(block) : part_of(scratch[2], 0, block);
    kernels::cross_entropy_gradient(stream, logits_of(block), labels, vocabulary.first + first, state,
                                    engine.loss_gradient_scale(), d_logits);
    if (wanted) {
      kernels::matmul(stream, {.transpose_a = true, .accumulate = d_table.accumulate}, d_logits, normed,
                      rows_of(d_table.view, first, columns), engine.workspace());
    }
    kernels::matmul(stream, {.accumulate = block + 1 < blocks.count}, d_logits,
                    rows_of(table, first, columns), summed, engine.workspace());
    if (!low_rank) return;
    kernels::matmul(stream, {.transpose_a = true, .accumulate = d_b.accumulate}, d_logits, inner[0],
                    rows_of(d_b.view, first, columns), engine.workspace());
    kernels::matmul(stream, {.accumulate = block + 1 < blocks.count}, d_logits,
                    rows_of(low_rank->b(), first, columns), inner_backward[0], engine.workspace());
  };
  // Proceeds from the last blocks, whose logits are still in memory, to the first.
  for (std::int64_t end = blocks.count; end > 0;) {
    const std::int64_t begin = (end - 1) / blocks.resident * blocks.resident;
    for (std::int64_t block = begin; end < blocks.count && block < end; ++block) compute_logits(block);
    for (std::int64_t block = end - 1; block >= begin; --block) backward(block);
    end = begin;
  }
  logits_memory.release();
  if (several && !in_place) kernels::cast(stream, summed, d_normed);
  if (low_rank) {
    const TensorView d_inner = inner_backward[in_place ? 0 : 1];
    kernels::scale(stream, low_rank->adapter().scale, inner_backward[0]);
    if (!in_place) kernels::cast(stream, inner_backward[0], d_inner);
    low_rank->input_gradient(d_inner, d_normed);
    add_a_gradient(engine, *gradients, low_rank->adapter(), normed, d_inner);
  }
  partial.scatter(name);
  model.final_norm_backward(pass, unit, *gradients, scratch[0], x, norm, *d_x);
}

void language_logits(const LanguageModel& model, const Pass& pass, const GatheredUnit& unit,
                     const ConstTensorView& x, std::int64_t first, std::int64_t count,
                     const TensorView& logits) {
  const StepTensors norm_memory = acquire_final_norm(pass, count);
  const FinalNorm norm = final_norm(norm_memory);
  model.final_norm_forward(pass, unit, rows_of(x, first, count), norm);
  kernels::matmul_rows(pass.engine.compute_stream(), true, norm.normed, head_weight(pass, unit), {}, logits,
                       pass.engine.workspace());
  if (const auto low_rank = head_adapter(pass, unit)) {
    low_rank->forward(norm.normed, logits, true);
  }
}

}  // namespace tranche::models
