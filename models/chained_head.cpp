// The head of a language model with chained sums over the axis `tensor`.

#include <algorithm>
#include <optional>

#include "models/chained_sums.h"
#include "models/language_head.h"
#include "models/low_rank.h"
#include "tranche/core/shape.h"
#include "tranche/engine/engine.h"
#include "tranche/kernels/copy_columns.h"
#include "tranche/kernels/cross_entropy.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/matmul.h"
#include "tranche/models/step_tensors.h"

namespace tranche::models {

namespace {

/// A rank's columns of a block of the vocabulary.
struct Piece {
  std::int64_t first = 0, count = 0;
};

/// A single rank's blocks of the vocabulary, each cut at the borders of the ranks' parts.
struct CutBlocks {
  std::int64_t vocabulary, ranks;
  std::int64_t count() const { return divide_round_up(vocabulary, head_block_columns); }
  std::int64_t first(std::int64_t block) const { return block * head_block_columns; }
  std::int64_t columns(std::int64_t block) const {
    return std::min(head_block_columns, vocabulary - first(block));
  }
  Piece piece(std::int64_t block, std::int64_t rank) const {
    const std::int64_t begin = std::max(first(block), vocabulary * rank / ranks);
    const std::int64_t end = std::min(first(block) + columns(block), vocabulary * (rank + 1) / ranks);
    return {begin, std::max<std::int64_t>(end - begin, 0)};
  }
};

TensorView matrix(const TensorView& memory, std::int64_t rows, std::int64_t columns) {
  return memory.slice(0, rows * columns).reshaped({rows, columns});
}

}  // namespace

void chained_language_head(const LanguageModel& model, const Pass& pass, const GatheredUnit& unit,
                           const UnitGradients* gradients, const ConstTensorView& x,
                           const ConstTensorView& targets, const TensorView& loss_sum,
                           const TensorView& token_count, const TensorView* d_x) {
  Engine& engine = pass.engine;
  Stream& stream = engine.compute_stream();
  const std::int64_t rows = pass.rows(), width = pass.shape.width, local = pass.local_rows();
  const auto dtype = pass.dtype();
  const CutBlocks blocks{pass.shape.vocabulary, pass.tensor_ranks()};
  const std::int64_t first_own = pass.part_of(pass.shape.vocabulary).first, most = blocks.columns(0);
  const ConstTensorView labels = targets.reshaped({rows});
  const ConstTensorView table = pass.own_tokens(unit.tensor(pass.shape.head_weight));
  const std::string_view name = unit.spec().name;
  const auto rows_of_piece = [&](const auto& of, const Piece& piece) {
    const std::int64_t columns = of.shape[1];
    return of.slice((piece.first - first_own) * columns, piece.count * columns)
        .reshaped({piece.count, columns});
  };

  const StepTensors memory(engine, Category::activations, "chained head",
                           {{dtype, {local, width}},
                            {DataType::float32, {local}},
                            {DataType::float32, {local}},
                            {DataType::float32, {rows}},
                            {DataType::float32, {rows}},
                            {DataType::float32, {rows}},
                            {DataType::float32, {rows * most}},
                            {DataType::float32, {rows * most}}});
  const FinalNorm norm{memory[0], memory[1], memory[2]};
  const kernels::CrossEntropyState state{memory[3], memory[4], memory[5]};
  model.final_norm_forward(pass, unit, x, norm);
  const GatheredRows normed(pass, name, norm.normed);
  // An adapter's A is whole, so every rank computes x A^T; B is cut like the table.
  const std::optional<LowRank> low_rank = head_adapter(pass, unit);
  const std::int64_t rank_of_adapter = low_rank ? low_rank->rank() : 0;
  const StepTensors inner(engine, Category::activations, "adapter", {{dtype, {rows, rank_of_adapter}}});
  if (low_rank) low_rank->inner(normed.view(), inner[0]);
  const auto logits_of = [&](const Piece& piece) {
    const TensorView logits = matrix(memory[6], rows, piece.count);
    kernels::matmul(stream, {.transpose_b = true}, normed.view(), rows_of_piece(table, piece), logits,
                    engine.workspace());
    if (low_rank) {
      kernels::matmul(stream, {.transpose_b = true, .accumulate = true}, inner[0],
                      rows_of_piece(low_rank->b(), piece), logits, engine.workspace());
    }
    return logits;
  };

  kernels::cross_entropy_begin(stream, state);
  for (std::int64_t block = 0; block < blocks.count(); ++block) {
    const TensorView whole = matrix(memory[7], rows, blocks.columns(block));
    for (int rank = 0; rank < pass.tensor_ranks(); ++rank) {
      const Piece piece = blocks.piece(block, rank);
      if (piece.count == 0) continue;
      if (rank == pass.tensor_rank()) (void)logits_of(piece);
      const TensorView logits = matrix(memory[6], rows, piece.count);
      broadcast_from_rank(pass, "logits of a block", rank, logits);
      kernels::copy_columns(stream, logits, 0, whole, piece.first - blocks.first(block), piece.count);
    }
    kernels::cross_entropy_accumulate(stream, whole, labels, blocks.first(block), state);
  }
  kernels::cross_entropy_finish(stream, labels, state, loss_sum, token_count);
  if (gradients == nullptr) return;

  // The blocks are summed as on a single rank: in fp32 if there are several.
  const bool several = blocks.count() > 1 && dtype != DataType::float32;
  const StepTensors scratch(engine, Category::activations, "chained head backward",
                            {{dtype, {local, width}},
                             {DataType::float32, {several ? rows : 0, width}},
                             {dtype, {rows * most}},
                             {DataType::float32, {rows, rank_of_adapter}},
                             {dtype, {rows, rank_of_adapter}}});
  PartialRows d_normed(pass, scratch[0]);
  const TensorView summed = several ? scratch[1] : d_normed.view();
  const bool wanted = gradients->wanted(pass.shape.head_weight);
  const GradientTarget d_table =
      wanted ? target_of_own(pass, *gradients, pass.shape.head_weight) : GradientTarget{};
  const GradientTarget d_b =
      low_rank ? target_of_own(pass, *gradients, low_rank->adapter().b) : GradientTarget{};
  const auto add_rows = [&](const GradientTarget& to, const Piece& piece, const ConstTensorView& d_logits,
                            const ConstTensorView& inputs) {
    kernels::matmul(stream, {.transpose_a = true, .accumulate = to.accumulate}, d_logits, inputs,
                    rows_of_piece(to.view, piece), engine.workspace());
  };
  for (std::int64_t block = blocks.count() - 1; block >= 0; --block) {
    const Piece piece = blocks.piece(block, pass.tensor_rank());
    const TensorView d_logits = matrix(scratch[2], rows, piece.count);
    if (piece.count > 0) {
      kernels::cross_entropy_gradient(stream, logits_of(piece), labels, piece.first, state,
                                      engine.loss_gradient_scale(), d_logits);
      if (wanted) add_rows(d_table, piece, d_logits, normed.view());
      if (low_rank) add_rows(d_b, piece, d_logits, inner[0]);
    }
    const auto add_inputs = [&](const ConstTensorView& weight, const TensorView& to) {
      const ChainedPart part{d_logits, piece.count > 0 ? rows_of_piece(weight, piece) : ConstTensorView{}};
      chained_product(pass, name, {&part, 1}, false, block + 1 < blocks.count(), to);
    };
    add_inputs(table, summed);
    if (low_rank) add_inputs(low_rank->b(), scratch[3]);
  }
  if (several) kernels::cast(stream, summed, d_normed.view());
  if (low_rank) {
    kernels::scale(stream, low_rank->adapter().scale, scratch[3]);
    kernels::cast(stream, scratch[3], scratch[4]);
    low_rank->input_gradient(scratch[4], d_normed.view());
    // A is whole on every rank, but only one rank adds its gradient.
    if (pass.tensor_rank() == 0) {
      add_a_gradient(engine, *gradients, low_rank->adapter(), normed.view(), scratch[4]);
    }
  }
  d_normed.mark_complete();
  d_normed.scatter(name);
  model.final_norm_backward(pass, unit, *gradients, scratch[0], x, norm, *d_x);
}

}  // namespace tranche::models
