#include "models/context_attention.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <string>
#include <vector>

#include "models/pass_messages.h"
#include "tranche/comm/communicator.h"
#include "tranche/engine/engine.h"
#include "tranche/kernels/copy_columns.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/models/context_rows.h"
#include "tranche/models/step_tensors.h"

namespace tranche::models {

namespace {

/// Elements of the queries, and of the keys, of one token.
struct Widths {
  std::int64_t query, key;
  Widths(const kernels::AttentionOptions& options, const Shape& out)
      : query(out[out.rank() - 1]),
        key(query / options.heads *
            (options.key_value_heads == 0 ? options.heads : options.key_value_heads)) {}
};

/// A message over the axis with `width` elements for each token. Its tensors are stored by rank, each with
/// that rank's rows, and are converted to sequences and back.
struct Exchange {
  const Pass& pass;
  std::int64_t width;

  std::int64_t samples() const { return pass.batch / pass.runs(); }
  std::int64_t tokens() const { return pass.sequence; }
  std::int64_t elements() const { return pass.rows() * width; }
  Stream& stream() const { return pass.engine.compute_stream(); }
  /// All tokens of all samples, [samples, tokens, width].
  TensorRequest sequences() const { return {pass.dtype(), {samples(), tokens(), width}}; }
  TensorRequest by_rank() const { return {pass.dtype(), {pass.context_ranks(), pass.rows(), width}}; }
  TensorView rows_of(const TensorView& of_ranks, int rank) const {
    return of_ranks.slice(rank * elements(), elements()).reshaped({pass.rows(), width});
  }

  /// Calls copy(run, first, whole, count) for each run of all samples: its first `count` columns correspond
  /// to columns [first, first + count) of `whole`, which has one row for each sample. The others are padding.
  template <typename Whole, typename Copy>
  void for_runs(const TensorView& of_ranks, const Whole& all, const Copy& copy) const {
    const std::int64_t of_run = pass.time * width;
    const Whole whole = all.reshaped({samples(), tokens() * width});
    for (int rank = 0; rank < pass.context_ranks(); ++rank) {
      for (int run = 0; run < 2; ++run) {
        const TensorView rows = rows_of_run(pass, rows_of(of_ranks, rank), run);
        const std::int64_t first = run_of_rank(run, rank, pass.context_ranks()) * of_run;
        const std::int64_t count = std::min(of_run, tokens() * width - first);
        if (count > 0) copy(rows.reshaped({samples(), of_run}), first, whole, count);
      }
    }
  }
  void to_sequences(const TensorView& of_ranks, const TensorView& all) const {
    for_runs(of_ranks, all,
             [&](const TensorView& run, std::int64_t first, const TensorView& whole, std::int64_t count) {
               kernels::copy_columns(stream(), run, 0, whole, first, count);
             });
  }
  /// Padding becomes zero.
  void to_ranks(const ConstTensorView& all, const TensorView& of_ranks) const {
    if (pass.padded()) kernels::fill_zero(stream(), of_ranks);
    for_runs(of_ranks, all,
             [&](const TensorView& run, std::int64_t first, const ConstTensorView& whole,
                 std::int64_t count) { kernels::copy_columns(stream(), whole, first, run, 0, count); });
  }
};

template <typename View>
View by_token(const View& x) {
  const std::int64_t columns = x.shape[x.shape.rank() - 1];
  return x.reshaped({x.elements() / columns, columns});
}

/// Copies `width` columns of each token's row.
void copy_heads(Stream& stream, const kernels::ConstHeads& from, const kernels::Heads& to,
                std::int64_t width) {
  kernels::copy_columns(stream, by_token(from.rows), from.first_column, by_token(to.rows), to.first_column,
                        width);
}

std::string keys_of(std::int64_t block) {
  return fmt::format("keys and values of block {}", block);
}
std::string heads_of(std::int64_t block) {
  return fmt::format("heads of block {}", block);
}

/// Gathers the keys and values of all ranks, side by side, in the layout of `exchange`.
StepTensors gather_keys(const Exchange& exchange, std::int64_t block, const AttentionInputs& inputs) {
  const Pass& pass = exchange.pass;
  Stream& stream = exchange.stream();
  const std::int64_t width = exchange.width / 2;
  StepTensors all(pass.engine, Category::activations, "gathered keys and values", {exchange.sequences()});
  const StepTensors sent(pass.engine, Category::activations, "keys and values of ranks",
                         {exchange.by_rank()});
  const TensorView own = exchange.rows_of(sent[0], pass.context_rank());
  copy_heads(stream, inputs.key, {own}, width);
  copy_heads(stream, inputs.value, {own, width}, width);
  const PassLabel label(pass, keys_of(block));
  const std::array<Event, 1> ready{stream.record()};
  wait_for(pass, pass.context->all_gather(own.data, sent[0].data, own.elements(), own.dtype, 0, ready,
                                          label.label()));
  exchange.to_sequences(sent[0], all[0]);
  return all;
}

/// The samples of a part among `all`, which has one row or more for each sample of the micro-batch.
template <typename View>
View samples_of(const Pass& pass, const View& all, const RunPart& part) {
  const std::int64_t of_sample = all.elements() / (pass.batch / pass.runs());
  std::vector<std::int64_t> extents(all.shape.extents().begin(), all.shape.extents().end());
  extents.front() = part.samples;
  return all.slice(part.first_sample * of_sample, part.samples * of_sample).reshaped(Shape(extents));
}

/// The statistics [batch, heads, time] of a part's queries, in the place of those of its samples.
template <typename View>
View statistics_of(const Pass& pass, const View& log_sum_exp, const RunPart& part) {
  const View run = rows_of_run(pass, log_sum_exp, part.run);
  const std::int64_t heads = run.shape[1], count = part.samples * heads * part.tokens;
  return run.slice(part.first_sample * heads * pass.time, count).reshaped({part.samples, heads, part.tokens});
}

kernels::AttentionOptions of_part(const Pass& pass, const kernels::AttentionOptions& options,
                                  const RunPart& part) {
  kernels::AttentionOptions made = options;
  made.first_query = pass.first_of_run(part.run);
  if (options.document_begin.shape.rank() > 0) {
    made.document_begin = samples_of(pass, options.document_begin, part);
  }
  if (!options.dropout.samples.empty()) {
    made.dropout.samples = options.dropout.samples.subspan(static_cast<std::size_t>(part.first_sample),
                                                           static_cast<std::size_t>(part.samples));
  }
  return made;
}

/// The options for this rank's heads, if the ranks of the axis divide them.
kernels::AttentionOptions of_own_heads(const Pass& pass, const kernels::AttentionOptions& options) {
  kernels::AttentionOptions made = options;
  made.heads /= pass.context_ranks();
  made.key_value_heads /= pass.context_ranks();
  made.first_head += pass.context_rank() * made.heads;
  return made;
}

/// Exchanges all columns of `all`, which has all tokens of all samples.
Exchange exchange_of(const Pass& pass, const ConstTensorView& all) {
  return {pass, all.shape[all.shape.rank() - 1]};
}

/// A part of a token's row, with an equal number of columns for each rank.
struct Part {
  kernels::ConstHeads heads;
  std::int64_t width;  ///< of all heads
};

/// Sends each rank its heads of `parts`, and writes the received ones, all tokens of this rank's heads, to
/// `all` [samples, tokens, columns], with the parts side by side.
void send_heads(const Pass& pass, std::int64_t block, std::initializer_list<Part> parts,
                const TensorView& all) {
  const int ranks = pass.context_ranks();
  const Exchange exchange = exchange_of(pass, all);
  const StepTensors memory(pass.engine, Category::activations, "heads of ranks",
                           {exchange.by_rank(), exchange.by_rank()});
  for (int rank = 0; rank < ranks; ++rank) {
    const TensorView to = exchange.rows_of(memory[0], rank);
    std::int64_t column = 0;
    for (const Part& part : parts) {
      const std::int64_t width = part.width / ranks;
      copy_heads(exchange.stream(), {part.heads.rows, part.heads.first_column + rank * width}, {to, column},
                 width);
      column += width;
    }
  }
  const PassLabel label(pass, heads_of(block));
  const std::array<Event, 1> ready{exchange.stream().record()};
  wait_for(pass, pass.context->all_to_all(memory[0].data, memory[1].data, exchange.elements(), all.dtype,
                                          ready, label.label()));
  exchange.to_sequences(memory[1], all);
}

/// A part of a token's row, as a destination.
struct PartTarget {
  kernels::Heads heads;
  std::int64_t width;  ///< of all heads
};

/// The reverse of send_heads(): each rank receives its tokens of all heads.
void send_tokens(const Pass& pass, std::int64_t block, const ConstTensorView& all,
                 std::initializer_list<PartTarget> parts) {
  const int ranks = pass.context_ranks();
  const Exchange exchange = exchange_of(pass, all);
  const StepTensors memory(pass.engine, Category::activations, "tokens of ranks",
                           {exchange.by_rank(), exchange.by_rank()});
  exchange.to_ranks(all, memory[0]);
  const PassLabel label(pass, heads_of(block));
  const std::array<Event, 1> ready{exchange.stream().record()};
  wait_for(pass, pass.context->all_to_all(memory[0].data, memory[1].data, exchange.elements(), all.dtype,
                                          ready, label.label()));
  for (int rank = 0; rank < ranks; ++rank) {
    const TensorView from = exchange.rows_of(memory[1], rank);
    std::int64_t column = 0;
    for (const PartTarget& part : parts) {
      const std::int64_t width = part.width / ranks;
      copy_heads(exchange.stream(), {from, column}, {part.heads.rows, part.heads.first_column + rank * width},
                 width);
      column += width;
    }
  }
}

/// The memory that exchanged_attention() saves: queries, keys and values side by side, and the output, of all
/// tokens and this rank's heads.
template <typename View>
struct Kept {
  View inputs, out;
  std::int64_t key_column, value_column;
  Kept(const Pass& pass, const Widths& widths, const View& kept) {
    const int ranks = pass.context_ranks();
    const std::int64_t samples = pass.batch / 2, rows = samples * pass.sequence;
    const std::int64_t queries = widths.query / ranks, keys = widths.key / ranks,
                       columns = queries + 2 * keys;
    if (kept.shape.rank() == 0 || kept.elements() < rows * (columns + queries)) {
      throw LogicError("attention over ranks of the axis context was given no memory for what it keeps");
    }
    inputs = kept.slice(0, rows * columns).reshaped({samples, rows / samples, columns});
    out = kept.slice(rows * columns, rows * queries).reshaped({samples, rows / samples, queries});
    key_column = queries;
    value_column = queries + keys;
  }
};

/// The statistics of this rank's heads and all tokens, in memory of the same size as for all heads and its
/// tokens.
template <typename View>
View of_own_heads(const Pass& pass, const View& log_sum_exp) {
  const std::int64_t samples = pass.batch / 2, heads = log_sum_exp.shape[1] / pass.context_ranks();
  return log_sum_exp.slice(0, samples * heads * pass.sequence).reshaped({samples, heads, pass.sequence});
}

}  // namespace

void gathered_attention(const Pass& pass, std::int64_t block, const kernels::AttentionOptions& options,
                        const AttentionInputs& inputs, const TensorView& out, const TensorView& log_sum_exp) {
  const std::int64_t width = Widths(options, out.shape).key;
  const Exchange exchange{pass, 2 * width};
  const StepTensors all = gather_keys(exchange, block, inputs);
  clear_padding(pass, out);
  for (const RunPart& part : parts_of_runs(pass)) {
    const TensorView keys = samples_of(pass, all[0], part);
    kernels::attention_forward(exchange.stream(), of_part(pass, options, part),
                               {rows_of_part(pass, inputs.query.rows, part), inputs.query.first_column},
                               {keys}, {keys, width}, rows_of_part(pass, out, part),
                               statistics_of(pass, log_sum_exp, part), pass.engine.workspace());
  }
}

void gathered_attention_backward(const Pass& pass, std::int64_t block,
                                 const kernels::AttentionOptions& options, const ConstTensorView& d_out,
                                 const AttentionInputs& inputs, const ConstTensorView& out,
                                 const ConstTensorView& log_sum_exp, const AttentionGradients& gradients) {
  const std::int64_t width = Widths(options, out.shape).key;
  const Exchange exchange{pass, 2 * width};
  Stream& stream = exchange.stream();
  const StepTensors all = gather_keys(exchange, block, inputs);
  const StepTensors d_all(pass.engine, Category::activations, "gradients of keys and values",
                          {exchange.sequences(), exchange.by_rank()});
  // The gradients of the second run's keys and values, in the message's memory.
  const TensorView second = d_all[1].slice(0, d_all[0].elements()).reshaped(d_all[0].shape);
  if (pass.tokens_of_run(1) == 0) kernels::fill_zero(stream, second);
  if (pass.tokens_of_run(0) == 0) kernels::fill_zero(stream, d_all[0]);
  clear_padding(pass, gradients.query.rows);
  for (const RunPart& part : parts_of_runs(pass)) {
    const TensorView keys = samples_of(pass, all[0], part),
                     d_keys = samples_of(pass, part.run == 0 ? d_all[0] : second, part);
    kernels::attention_backward(
        stream, of_part(pass, options, part), rows_of_part(pass, d_out, part),
        {rows_of_part(pass, inputs.query.rows, part), inputs.query.first_column}, {keys}, {keys, width},
        rows_of_part(pass, out, part), statistics_of(pass, log_sum_exp, part),
        {rows_of_part(pass, gradients.query.rows, part), gradients.query.first_column}, {d_keys},
        {d_keys, width}, pass.engine.workspace());
  }
  kernels::add(stream, d_all[0], second, d_all[0]);
  const TensorView& sent = d_all[1];
  const TensorView own = exchange.rows_of(sent, pass.context_rank());
  exchange.to_ranks(d_all[0], sent);
  const PassLabel label(pass, keys_of(block));
  const std::array<Event, 1> ready{stream.record()};
  wait_for(pass, pass.context->reduce_scatter(sent.data, sent.dtype, own.data, own.dtype, own.elements(), {},
                                              ready, label.label()));
  copy_heads(stream, {own}, gradients.key, width);
  copy_heads(stream, {own, width}, gradients.value, width);
}

void exchanged_attention(const Pass& pass, std::int64_t block, const kernels::AttentionOptions& options,
                         const AttentionInputs& inputs, const TensorView& out, const TensorView& log_sum_exp,
                         const TensorView& kept) {
  const Widths widths(options, out.shape);
  const Kept<TensorView> all(pass, widths, kept);
  send_heads(pass, block,
             {{inputs.query, widths.query}, {inputs.key, widths.key}, {inputs.value, widths.key}},
             all.inputs);
  kernels::attention_forward(pass.engine.compute_stream(), of_own_heads(pass, options), {all.inputs},
                             {all.inputs, all.key_column}, {all.inputs, all.value_column}, all.out,
                             of_own_heads(pass, log_sum_exp), pass.engine.workspace());
  send_tokens(pass, block, all.out, {{{out}, widths.query}});
}

void exchanged_attention_backward(const Pass& pass, std::int64_t block,
                                  const kernels::AttentionOptions& options, const ConstTensorView& d_out,
                                  const ConstTensorView& log_sum_exp, const ConstTensorView& kept,
                                  const AttentionGradients& gradients) {
  const Widths widths(options, d_out.shape);
  const Kept<ConstTensorView> all(pass, widths, kept);
  const StepTensors d_all(pass.engine, Category::activations, "gradients of heads",
                          {{pass.dtype(), all.out.shape}, {pass.dtype(), all.inputs.shape}});
  send_heads(pass, block, {{{d_out}, widths.query}}, d_all[0]);
  kernels::attention_backward(
      pass.engine.compute_stream(), of_own_heads(pass, options), d_all[0], {all.inputs},
      {all.inputs, all.key_column}, {all.inputs, all.value_column}, all.out, of_own_heads(pass, log_sum_exp),
      {d_all[1]}, {d_all[1], all.key_column}, {d_all[1], all.value_column}, pass.engine.workspace());
  send_tokens(pass, block, d_all[1],
              {{gradients.query, widths.query}, {gradients.key, widths.key}, {gradients.value, widths.key}});
}

}  // namespace tranche::models
