#include "models/chained_sums.h"

#include <cstddef>
#include <initializer_list>
#include <string>
#include <vector>

#include "tranche/engine/engine.h"
#include "tranche/kernels/copy_columns.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/layer_norm.h"
#include "tranche/kernels/matmul.h"
#include "tranche/kernels/rms_norm.h"
#include "tranche/models/step_tensors.h"

namespace tranche::models {

void chained_product(const Pass& pass, std::string_view unit, std::span<const ChainedPart> parts,
                     bool transpose_b, bool accumulate, const TensorView& c) {
  Engine& engine = pass.engine;
  Stream& stream = engine.compute_stream();
  const StepTensors memory(engine, Category::activations, "sums of a chain", {{DataType::float32, c.shape}});
  const TensorView& sums = memory[0];
  const bool begins =
      accumulate && kernels::matmul_sum_order(stream.kind(), parts.front().a.dtype).begins_with_c;
  if (begins) {
    kernels::cast(stream, c, sums);
  } else {
    kernels::fill_zero(stream, sums);
  }
  for (const ChainedPart& part : parts) {
    for (int rank = 0; rank < pass.tensor_ranks(); ++rank) {
      if (rank == pass.tensor_rank() && part.a.shape[1] > 0) {
        kernels::matmul(stream, {.transpose_b = transpose_b, .continues = true}, part.a, part.b, sums,
                        engine.workspace());
      }
      broadcast_from_rank(pass, unit, rank, sums);
    }
  }
  if (accumulate && !begins) {
    kernels::accumulate(stream, sums, c);
  } else {
    kernels::cast(stream, sums, c);
  }
}

BlocksOfColumns::BlocksOfColumns(Engine& engine, const ConstTensorView& d_out, const ConstTensorView& weight,
                                 bool in_out, int blocks) {
  if (blocks == 1) {
    parts_.push_back({d_out, weight});
    return;
  }
  Stream& stream = engine.compute_stream();
  const std::int64_t rows = d_out.shape[0], columns = d_out.shape[1] / blocks,
                     in = weight.shape[in_out ? 0 : 1];
  for (int block = 0; block < blocks; ++block) {
    memory_.emplace_back(engine, Category::activations, "blocks of a fused layer",
                         std::initializer_list<TensorRequest>{{d_out.dtype, {rows, columns}},
                                                              {weight.dtype, {in_out ? in : 0, columns}}});
    const StepTensors& own = memory_.back();
    kernels::copy_columns(stream, d_out, block * columns, own[0], 0, columns);
    if (in_out) kernels::copy_columns(stream, weight, block * columns, own[1], 0, columns);
    parts_.push_back(
        {own[0], in_out ? ConstTensorView(own[1])
                        : weight.slice(block * columns * in, columns * in).reshaped({columns, in})});
  }
}

void norm_backward(const Pass& pass, const GatheredUnit& unit, const UnitGradients& gradients,
                   const NormTensors& norm, const ConstTensorView& d_y, const ConstTensorView& x,
                   const ConstTensorView& mean, const ConstTensorView& rstd, bool accumulate,
                   const TensorView& d_x) {
  Engine& engine = pass.engine;
  Stream& stream = engine.compute_stream();
  const bool has_bias = norm.bias >= 0;
  const auto kernel = [&](const ConstTensorView& of_y, const ConstTensorView& of_x,
                          const ConstTensorView& means, const ConstTensorView& scales, bool add,
                          const TensorView& to, const TensorView& d_weight, const TensorView& d_bias) {
    if (has_bias) {
      kernels::layer_norm_backward(stream, of_y, of_x, unit.tensor(norm.weight), means, scales, add, to,
                                   d_weight, d_bias, engine.workspace());
    } else {
      kernels::rms_norm_backward(stream, of_y, of_x, unit.tensor(norm.weight), scales, add, to, d_weight,
                                 engine.workspace());
    }
  };
  const auto add_all = [&](const ConstTensorView& of_y, const ConstTensorView& of_x,
                           const ConstTensorView& means, const ConstTensorView& scales, bool add,
                           const TensorView& to) {
    kernel(of_y, of_x, means, scales, add, to, gradients.tensor(norm.weight),
           has_bias ? gradients.tensor(norm.bias) : TensorView{});
  };
  if (!pass.chained()) return add_all(d_y, x, mean, rstd, accumulate, d_x);

  const std::int64_t rows = pass.rows(), local = pass.local_rows(), width = x.shape[1];
  const std::string_view name = unit.spec().name;
  const GatheredRows all_d_y(pass, name, d_y), all_x(pass, name, x),
      all_rstd(pass, name, rstd.reshaped({local, 1})),
      all_mean(pass, name, (has_bias ? mean : rstd).reshaped({local, 1}));
  const StepTensors scratch(
      engine, Category::activations, "norm backward",
      {{DataType::float32, {width}}, {DataType::float32, {width}}, {x.dtype, {rows, width}}});
  kernels::fill_zero(stream, scratch[0]);
  kernels::fill_zero(stream, scratch[1]);
  kernel(d_y, x, mean, rstd, accumulate, d_x, scratch[0], scratch[1]);
  if (pass.tensor_rank() != 0) return;
  add_all(all_d_y.view(), all_x.view(), all_mean.view().reshaped({rows}), all_rstd.view().reshaped({rows}),
          false, scratch[2]);
}

StepTensors gather_columns(const Pass& pass, std::string_view unit, const ConstTensorView& own,
                           const ColumnsOf& ranks) {
  const std::int64_t rows = own.shape[0], columns = own.shape[1];
  StepTensors side_by_side(pass.engine, Category::activations, "columns of ranks",
                           {{own.dtype, {rows, ranks.count * columns}}});
  const StepTensors all(pass.engine, Category::activations, "gathered columns",
                        {{own.dtype, {pass.tensor_ranks() * rows, columns}}});
  gather_from_ranks(pass, unit, own.data, all[0].data, own.elements(), own.dtype);
  for (int i = 0; i < ranks.count; ++i) {
    const std::int64_t rank = ranks.first + i * ranks.step;
    kernels::copy_columns(pass.engine.compute_stream(),
                          all[0].slice(rank * own.elements(), own.elements()).reshaped(own.shape), 0,
                          side_by_side[0], i * columns, columns);
  }
  return side_by_side;
}

void head_norm_backward(const Pass& pass, const GatheredUnit& unit, const UnitGradients& gradients,
                        int weight, const TensorView& d_y, const TensorView& x, const TensorView& rstd,
                        int sharers, const TensorView& d_x) {
  Engine& engine = pass.engine;
  Stream& stream = engine.compute_stream();
  const std::int64_t head_width = unit.tensor(weight).elements(), rows = pass.rows();
  const auto kernel = [&](const TensorView& of_y, const TensorView& of_x, const TensorView& scales,
                          const TensorView& to, const TensorView& d_weight) {
    const Shape heads{of_x.elements() / head_width, head_width};
    kernels::rms_norm_backward(stream, of_y.reshaped(heads), of_x.reshaped(heads), unit.tensor(weight),
                               scales.reshaped({heads[0]}), false, to.reshaped(heads), d_weight,
                               engine.workspace());
  };
  if (!pass.chained()) return kernel(d_y, x, rstd, d_x, gradients.tensor(weight));

  const ColumnsOf distinct{.count = pass.tensor_ranks() / sharers, .step = sharers};
  const std::string& name = unit.spec().name;
  const StepTensors all_d_y = gather_columns(pass, name, d_y, distinct),
                    all_x = gather_columns(pass, name, x, distinct),
                    all_rstd =
                        gather_columns(pass, name, rstd.reshaped({rows, rstd.elements() / rows}), distinct);
  const StepTensors scratch(engine, Category::activations, "head norm backward",
                            {{DataType::float32, {head_width}}, {x.dtype, all_x[0].shape}});
  kernels::fill_zero(stream, scratch[0]);
  kernel(d_y, x, rstd, d_x, scratch[0]);
  if (pass.tensor_rank() != 0) return;
  kernel(all_d_y[0], all_x[0], all_rstd[0], scratch[1], gradients.tensor(weight));
}

void shared_attention_backward(const Pass& pass, const GatheredUnit& unit,
                               const kernels::AttentionOptions& options, int sharers,
                               const ConstTensorView& d_out, const HeadTensors& inputs,
                               const ConstTensorView& out, const ConstTensorView& log_sum_exp,
                               const HeadTensors& gradients) {
  Engine& engine = pass.engine;
  Stream& stream = engine.compute_stream();
  const auto kernel = [&](const kernels::AttentionOptions& heads, const ConstTensorView& of_out,
                          const ConstTensorView& query, const ConstTensorView& result,
                          const ConstTensorView& sums, const TensorView& d_query) {
    const auto by_sequence = [&](const auto& x) { return x.reshaped({pass.batch, pass.time, x.shape[1]}); };
    kernels::attention_backward(stream, heads, by_sequence(of_out), {by_sequence(query)},
                                {by_sequence(inputs.key)}, {by_sequence(inputs.value)}, by_sequence(result),
                                sums, {by_sequence(d_query)}, {by_sequence(gradients.key)},
                                {by_sequence(gradients.value)}, engine.workspace());
  };
  const ColumnsOf group{.first = pass.tensor_rank() / sharers * sharers, .count = sharers};
  const std::string& name = unit.spec().name;
  const StepTensors all_d_out = gather_columns(pass, name, d_out, group),
                    all_queries = gather_columns(pass, name, inputs.query, group),
                    all_out = gather_columns(pass, name, out, group),
                    all_sums = gather_columns(
                        pass, name, log_sum_exp.reshaped({pass.batch, options.heads * pass.time}), group);
  const StepTensors scratch(engine, Category::activations, "attention backward of a group",
                            {{d_out.dtype, all_queries[0].shape}});
  if (pass.tensor_rank() != group.first) {
    return kernel(options, d_out, inputs.query, out, log_sum_exp, gradients.query);
  }
  kernels::AttentionOptions whole = options;
  whole.heads *= sharers;
  kernel(whole, all_d_out[0], all_queries[0], all_out[0],
         all_sums[0].reshaped({pass.batch, whole.heads, pass.time}), scratch[0]);
  kernels::copy_columns(stream, scratch[0], 0, gradients.query, 0, gradients.query.shape[1]);
}

}  // namespace tranche::models
