#include "models/chained_sums.h"

#include <vector>

#include "tranche/engine/engine.h"
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

}  // namespace tranche::models
