#include "models/low_rank.h"

#include "models/chained_sums.h"
#include "tranche/comm/communicator.h"
#include "tranche/core/error.h"
#include "tranche/engine/engine.h"
#include "tranche/kernels/matmul.h"
#include "tranche/kernels/matmul_rows.h"
#include "tranche/models/context_rows.h"

namespace tranche::models {

namespace {

/// Dropout is applied only in training.
bool drops(const Engine& engine, const LowRankAdapter& adapter) {
  return adapter.dropout > 0 && !engine.evaluating();
}

/// The dropout of `columns` inputs of the adapter's layer: all of them, or this rank's part.
kernels::DropoutOptions dropout_of(Engine& engine, const UnitSpec& unit, const LowRankAdapter& adapter,
                                   std::int64_t columns) {
  if (engine.micro_batch_samples().empty()) {
    throw InvalidArgument(
        "tranche.lora.dropout is keyed by samples, and Engine::begin_micro_batch() was given none; give it "
        "the global index of each sequence");
  }
  kernels::DropoutOptions options{.probability = adapter.dropout,
                                  .seed = engine.config().seed,
                                  .step = static_cast<std::uint64_t>(engine.steps()),
                                  .site = adapter.site,
                                  .samples = engine.micro_batch_samples()};
  // A row layer's inputs are cut like the columns of A, with the masks of the whole layer.
  const TensorSpec& a = unit.tensors[static_cast<std::size_t>(adapter.a)];
  const std::int64_t whole = a.shape[1];
  if (columns == whole) return options;
  const Dimension& inputs = a.dimensions[1];
  const Runtime& runtime = engine.runtime();
  const std::int64_t ranks = runtime.mesh().size(MeshAxis::tensor),
                     rank = runtime.mesh().coordinate(MeshAxis::tensor, runtime.rank());
  const std::int64_t grains = whole / inputs.blocks / inputs.grain;
  options.row_elements = whole;
  options.column_blocks = inputs.blocks;
  options.first_column = grains * rank / ranks * inputs.grain;
  return options;
}

/// y = dropout(x) of all rows, or of this rank's runs of tokens on the axis `context` (context_rows.h).
void drop(Engine& engine, const UnitSpec& unit, const LowRankAdapter& adapter, const ConstTensorView& x,
          const TensorView& y) {
  const std::int64_t columns = x.shape[1];
  kernels::DropoutOptions options = dropout_of(engine, unit, adapter, columns);
  const Communicator* const context = engine.runtime().context();
  const int runs = context == nullptr ? 1 : 2;
  const std::int64_t rows = x.shape[0] / runs,
                     time = rows / static_cast<std::int64_t>(options.samples.size());
  const std::int64_t row_elements = options.row_elements == 0 ? columns : options.row_elements;
  for (int run = 0; run < runs; ++run) {
    if (context != nullptr) {
      options.sample_offset = run_of_rank(run, context->rank(), context->size()) * time * row_elements;
    }
    const std::int64_t first = run * rows * columns, count = rows * columns;
    kernels::dropout(engine.compute_stream(), options, x.slice(first, count).reshaped({rows, columns}),
                     y.slice(first, count).reshaped({rows, columns}));
  }
}

/// dropout(x), in separate memory if there is dropout.
class Dropped {
 public:
  Dropped(Engine& engine, const UnitSpec& unit, const LowRankAdapter& adapter, const ConstTensorView& x)
      : view_(x) {
    if (!drops(engine, adapter)) return;
    memory_ = StepTensors(engine, Category::activations, "adapter's dropout", {{x.dtype, x.shape}});
    drop(engine, unit, adapter, x, memory_[0]);
    view_ = memory_[0];
  }
  const ConstTensorView& view() const { return view_; }

 private:
  StepTensors memory_;
  ConstTensorView view_;
};

void multiply_by(Engine& engine, float scale, const TensorView& x) {
  if (scale != 1) kernels::scale(engine.compute_stream(), scale, x);
}

/// d_weight += a^T b, or = for the first gradient of a step.
void add_product(Engine& engine, const UnitGradients& gradients, int index, const ConstTensorView& a,
                 const ConstTensorView& b) {
  if (!gradients.wanted(index)) return;
  const GradientTarget target = gradients.target(index);
  kernels::matmul(engine.compute_stream(), {.transpose_a = true, .accumulate = target.accumulate}, a, b,
                  target.view, engine.workspace());
}

}  // namespace

std::optional<LowRank> LowRank::of(Engine& engine, const GatheredUnit& unit, int weight) {
  const LowRankAdapter* adapter = unit.spec().adapter_of(weight);
  if (adapter == nullptr) return std::nullopt;
  return LowRank(engine, unit, *adapter);
}

void LowRank::inner(const ConstTensorView& x, const TensorView& inner) const {
  const Dropped dropped(*engine_, *unit_, *adapter_, x);
  kernels::matmul(engine_->compute_stream(), {.transpose_b = true}, dropped.view(), a_, inner,
                  engine_->workspace());
  multiply_by(*engine_, adapter_->scale, inner);
}

void LowRank::forward(const ConstTensorView& x, const TensorView& out, bool by_rows) const {
  if (by_rows) return forward_by_rows(x, out);
  const StepTensors memory(*engine_, Category::activations, "adapter", {{dtype(), {x.shape[0], rank()}}});
  inner(x, memory[0]);
  add_outputs(memory[0], out);
}

void LowRank::add_outputs(const ConstTensorView& inner, const TensorView& out) const {
  kernels::matmul(engine_->compute_stream(), {.transpose_b = true, .accumulate = true}, inner, b_, out,
                  engine_->workspace());
}

void LowRank::chained_inner(const Pass& pass, const ConstTensorView& x, const TensorView& inner) const {
  const Dropped dropped(*engine_, *unit_, *adapter_, x);
  const ChainedPart part{dropped.view(), a_};
  chained_product(pass, unit_->name, {&part, 1}, true, false, inner);
  multiply_by(*engine_, adapter_->scale, inner);
}

void LowRank::forward_by_rows(const ConstTensorView& x, const TensorView& out) const {
  const StepTensors memory(*engine_, Category::activations, "adapter",
                           {{dtype(), {x.shape[0], rank()}}, {out.dtype, out.shape}});
  Stream& stream = engine_->compute_stream();
  kernels::matmul_rows(stream, true, x, a_, {}, memory[0], engine_->workspace());
  multiply_by(*engine_, adapter_->scale, memory[0]);
  kernels::matmul_rows(stream, true, memory[0], b_, {}, memory[1], engine_->workspace());
  kernels::accumulate(stream, memory[1], out);
}

void LowRank::inner_gradient(const ConstTensorView& d_out, const TensorView& d_inner) const {
  kernels::matmul(engine_->compute_stream(), {}, d_out, b_, d_inner, engine_->workspace());
  multiply_by(*engine_, adapter_->scale, d_inner);
}

void LowRank::chained_inner_gradient(const Pass& pass, const ConstTensorView& d_out, int blocks,
                                     const TensorView& d_inner) const {
  const BlocksOfColumns parts(*engine_, d_out, b_, false, blocks);
  chained_product(pass, unit_->name, parts.list(), false, false, d_inner);
  multiply_by(*engine_, adapter_->scale, d_inner);
}

void LowRank::input_gradient(const ConstTensorView& d_inner, const TensorView& d_x) const {
  Stream& stream = engine_->compute_stream();
  if (!drops(*engine_, *adapter_)) {
    kernels::matmul(stream, {.accumulate = true}, d_inner, a_, d_x, engine_->workspace());
    return;
  }
  const StepTensors memory(*engine_, Category::activations, "adapter's dropout", {{d_x.dtype, d_x.shape}});
  kernels::matmul(stream, {}, d_inner, a_, memory[0], engine_->workspace());
  drop(*engine_, *unit_, *adapter_, memory[0], memory[0]);
  kernels::accumulate(stream, memory[0], d_x);
}

void add_a_gradient(Engine& engine, const UnitGradients& gradients, const LowRankAdapter& adapter,
                    const ConstTensorView& x, const ConstTensorView& d_inner) {
  if (!gradients.wanted(adapter.a)) return;
  const Dropped dropped(engine, gradients.spec(), adapter, x);
  add_product(engine, gradients, adapter.a, d_inner, dropped.view());
}

void add_b_gradient(Engine& engine, const UnitGradients& gradients, const LowRankAdapter& adapter,
                    const ConstTensorView& inner, const ConstTensorView& d_out) {
  add_product(engine, gradients, adapter.b, d_out, inner);
}

}  // namespace tranche::models
