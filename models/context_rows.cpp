#include "tranche/models/context_rows.h"

#include <algorithm>

#include "tranche/comm/communicator.h"
#include "tranche/engine/engine.h"
#include "tranche/kernels/copy_columns.h"

namespace tranche::models {

int Pass::context_ranks() const {
  return context == nullptr ? 1 : context->size();
}

int Pass::context_rank() const {
  return context == nullptr ? 0 : context->rank();
}

bool Pass::exchanges_heads() const {
  return context != nullptr && engine.config().context_exchange == ContextExchange::ulysses;
}

std::int64_t Pass::first_of_run(int run) const {
  return context == nullptr ? 0 : run_of_rank(run, context_rank(), context_ranks()) * time;
}

void copy_local_tokens(const Pass& pass, const ConstTensorView& whole, const TensorView& local) {
  for (int run = 0; run < pass.runs(); ++run) {
    kernels::copy_columns(pass.engine.compute_stream(), whole, pass.first_of_run(run),
                          rows_of_run(pass, local, run), 0, pass.time);
  }
}

LocalBatch::LocalBatch(Pass& pass, const TokenBatch& batch) : tokens_(batch.tokens), targets_(batch.targets) {
  if (pass.context == nullptr) return;
  const TensorRequest numbers{DataType::int32, {pass.batch, pass.time}};
  memory_ = StepTensors(pass.engine, Category::activations, "tokens of this rank",
                        {numbers, numbers, {DataType::int32, {batch.positions ? pass.batch : 0, pass.time}}});
  copy_local_tokens(pass, batch.tokens, memory_[0]);
  copy_local_tokens(pass, batch.targets, memory_[1]);
  tokens_ = memory_[0];
  targets_ = memory_[1];
  if (!batch.positions) return;
  copy_local_tokens(pass, *batch.positions, memory_[2]);
  pass.positions = memory_[2];
}

void dropout_rows(const Pass& pass, float probability, std::uint32_t site, const ConstTensorView& x,
                  const TensorView& y) {
  Stream& stream = pass.engine.compute_stream();
  kernels::DropoutOptions options = pass.dropout(probability, site);
  if (pass.tensor == nullptr && pass.context == nullptr) return kernels::dropout(stream, options, x, y);
  const std::int64_t width = pass.shape.width, of_run = pass.rows() / pass.runs();
  // Rows after the last run are padding of the axis `tensor`.
  const std::int64_t first = pass.tensor_rank() * pass.local_rows(), end = first + pass.local_rows();
  options.sample_elements = pass.time * width;
  for (int run = 0; run < pass.runs(); ++run) {
    const bool last = run + 1 == pass.runs();
    const std::int64_t begin = std::max(first, run * of_run), stop = last ? end : std::min(end, of_run);
    if (begin >= stop) continue;
    options.first_element = (begin - run * of_run) * width;
    options.sample_offset = pass.first_of_run(run) * width;
    const std::int64_t at = (begin - first) * width, count = (stop - begin) * width;
    kernels::dropout(stream, options, x.slice(at, count), y.slice(at, count));
  }
}

}  // namespace tranche::models
