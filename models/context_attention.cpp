#include "models/context_attention.h"

#include <fmt/core.h>

#include <array>
#include <string>

#include "models/pass_messages.h"
#include "tranche/comm/communicator.h"
#include "tranche/engine/engine.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/models/context_rows.h"
#include "tranche/models/step_tensors.h"

namespace tranche::models {

namespace {

/// The sizes of an exchange over the axis. `width` elements of keys, and as many of values, belong to a token.
struct Exchange {
  const Pass& pass;
  std::int64_t width;
  std::string name;
  Exchange(const Pass& of, std::int64_t block, const kernels::AttentionOptions& options,
           const ConstTensorView& out)
      : pass(of), name(fmt::format("keys and values of block {}", block)) {
    const std::int64_t key_heads = options.key_value_heads == 0 ? options.heads : options.key_value_heads;
    width = out.shape[out.shape.rank() - 1] / options.heads * key_heads;
  }
  std::int64_t samples() const { return pass.batch / pass.runs(); }
  std::int64_t tokens() const { return 2 * pass.context_ranks() * pass.time; }
  /// Elements of a rank's rows.
  std::int64_t of_rank() const { return pass.rows() * 2 * width; }
  Stream& stream() const { return pass.engine.compute_stream(); }
  /// Keys beside their values, a row for each token.
  TensorRequest all_tokens() const { return {pass.dtype(), {samples(), tokens(), 2 * width}}; }
  /// The same rank by rank, as they are sent.
  TensorRequest by_rank() const { return {pass.dtype(), {pass.context_ranks(), pass.rows(), 2 * width}}; }
  TensorView rows_of(const TensorView& by_rank, int rank) const {
    return by_rank.slice(rank * of_rank(), of_rank()).reshaped({pass.rows(), 2 * width});
  }
  TensorView own(const TensorView& by_rank) const { return rows_of(by_rank, pass.context_rank()); }

  /// Calls copy(run, first, whole, count): a run of all samples, [samples, count], is at columns
  /// [first, first + count) of the sequences, [samples, ...].
  template <typename Copy>
  void for_runs(const TensorView& of_ranks, const TensorView& all, const Copy& copy) const {
    const std::int64_t count = pass.time * 2 * width;
    const TensorView whole = all.reshaped({samples(), tokens() * 2 * width});
    for (int rank = 0; rank < pass.context_ranks(); ++rank) {
      for (int run = 0; run < 2; ++run) {
        const TensorView rows = rows_of_run(pass, rows_of(of_ranks, rank), run);
        copy(rows.reshaped({samples(), count}), run_of_rank(run, rank, pass.context_ranks()) * count, whole,
             count);
      }
    }
  }
};

ConstTensorView rows_of_tokens(const ConstTensorView& x) {
  const std::int64_t columns = x.shape[x.shape.rank() - 1];
  return x.reshaped({x.elements() / columns, columns});
}
TensorView rows_of_tokens(const TensorView& x) {
  const std::int64_t columns = x.shape[x.shape.rank() - 1];
  return x.reshaped({x.elements() / columns, columns});
}

/// The keys and values of all ranks, [samples, tokens, 2 width].
StepTensors gather_keys(const Exchange& exchange, const kernels::ConstHeads& key,
                        const kernels::ConstHeads& value) {
  const Pass& pass = exchange.pass;
  Stream& stream = exchange.stream();
  const std::int64_t width = exchange.width;
  StepTensors all(pass.engine, Category::activations, "gathered keys and values", {exchange.all_tokens()});
  const StepTensors sent(pass.engine, Category::activations, "keys and values of ranks",
                         {exchange.by_rank()});
  const TensorView own = exchange.own(sent[0]);
  kernels::copy_columns(stream, rows_of_tokens(key.rows), key.first_column, own, 0, width);
  kernels::copy_columns(stream, rows_of_tokens(value.rows), value.first_column, own, width, width);
  const PassLabel label(pass, exchange.name);
  const std::array<Event, 1> ready{stream.record()};
  wait_for(pass, pass.context->all_gather(own.data, sent[0].data, own.elements(), own.dtype, 0, ready,
                                          label.label()));
  exchange.for_runs(sent[0], all[0],
                    [&](const TensorView& run, std::int64_t first, const TensorView& whole,
                        std::int64_t count) {
                      kernels::copy_columns(stream, run, 0, whole, first, count);
                    });
  return all;
}

kernels::AttentionOptions of_run(const Pass& pass, const kernels::AttentionOptions& options, int run) {
  kernels::AttentionOptions made = options;
  made.first_query = pass.first_of_run(run);
  return made;
}

}  // namespace

void gathered_attention(const Pass& pass, std::int64_t block, const kernels::AttentionOptions& options,
                        const kernels::ConstHeads& query, const kernels::ConstHeads& key,
                        const kernels::ConstHeads& value, const TensorView& out,
                        const TensorView& log_sum_exp) {
  const Exchange exchange(pass, block, options, out);
  const StepTensors all = gather_keys(exchange, key, value);
  for (int run = 0; run < pass.runs(); ++run) {
    kernels::attention_forward(exchange.stream(), of_run(pass, options, run),
                               {rows_of_run(pass, query.rows, run), query.first_column}, {all[0]},
                               {all[0], exchange.width}, rows_of_run(pass, out, run),
                               rows_of_run(pass, log_sum_exp, run), pass.engine.workspace());
  }
}

void gathered_attention_backward(const Pass& pass, std::int64_t block,
                                 const kernels::AttentionOptions& options, const ConstTensorView& d_out,
                                 const kernels::ConstHeads& query, const kernels::ConstHeads& key,
                                 const kernels::ConstHeads& value, const ConstTensorView& out,
                                 const ConstTensorView& log_sum_exp, const kernels::Heads& d_query,
                                 const kernels::Heads& d_key, const kernels::Heads& d_value) {
  const Exchange exchange(pass, block, options, out);
  Stream& stream = exchange.stream();
  const std::int64_t width = exchange.width;
  const StepTensors all = gather_keys(exchange, key, value);
  const StepTensors d_all(pass.engine, Category::activations, "gradients of keys and values",
                          {exchange.all_tokens(), exchange.all_tokens()});
  for (int run = 0; run < pass.runs(); ++run) {
    kernels::attention_backward(
        stream, of_run(pass, options, run), rows_of_run(pass, d_out, run),
        {rows_of_run(pass, query.rows, run), query.first_column}, {all[0]}, {all[0], width},
        rows_of_run(pass, out, run), rows_of_run(pass, log_sum_exp, run),
        {rows_of_run(pass, d_query.rows, run), d_query.first_column}, {d_all[run]}, {d_all[run], width},
        pass.engine.workspace());
  }
  kernels::add(stream, d_all[0], d_all[1], d_all[0]);
  const TensorView sent = d_all[1].reshaped(exchange.by_rank().shape), own = exchange.own(sent);
  exchange.for_runs(sent, d_all[0],
                    [&](const TensorView& run, std::int64_t first, const TensorView& whole,
                        std::int64_t count) {
                      kernels::copy_columns(stream, whole, first, run, 0, count);
                    });
  const PassLabel label(pass, exchange.name);
  const std::array<Event, 1> ready{stream.record()};
  wait_for(pass, pass.context->reduce_scatter(sent.data, sent.dtype, own.data, own.dtype, own.elements(), {},
                                              ready, label.label()));
  kernels::copy_columns(stream, own, 0, rows_of_tokens(d_key.rows), d_key.first_column, width);
  kernels::copy_columns(stream, own, width, rows_of_tokens(d_value.rows), d_value.first_column, width);
}

}  // namespace tranche::models
