#include "tranche/models/context_rows.h"

#include <algorithm>

#include "tranche/comm/communicator.h"
#include "tranche/engine/engine.h"
#include "tranche/kernels/copy_columns.h"
#include "tranche/kernels/cross_entropy.h"
#include "tranche/kernels/elementwise.h"

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

std::int64_t Pass::tokens_of_run(int run) const {
  return context == nullptr ? time : std::clamp<std::int64_t>(sequence - first_of_run(run), 0, time);
}

bool Pass::padded() const {
  return context != nullptr && 2 * context_ranks() * time != sequence;
}

std::vector<RunPart> parts_of_runs(const Pass& pass) {
  const std::int64_t samples = pass.batch / pass.runs();
  std::vector<RunPart> parts;
  for (int run = 0; run < pass.runs(); ++run) {
    const std::int64_t tokens = pass.tokens_of_run(run);
    if (tokens == pass.time) {
      parts.push_back({run, 0, samples, tokens});
      continue;
    }
    for (std::int64_t sample = 0; tokens > 0 && sample < samples; ++sample) {
      parts.push_back({run, sample, 1, tokens});
    }
  }
  return parts;
}

void clear_padding(const Pass& pass, const TensorView& rows) {
  const std::int64_t of_token = rows.elements() / pass.rows(), samples = pass.batch / pass.runs();
  for (int run = 0; run < pass.runs(); ++run) {
    const std::int64_t tokens = pass.tokens_of_run(run);
    if (tokens == pass.time) continue;
    // The samples of a run without tokens lie side by side.
    const std::int64_t pieces = tokens == 0 ? 1 : samples, count = samples / pieces * (pass.time - tokens);
    for (std::int64_t piece = 0; piece < pieces; ++piece) {
      const std::int64_t first = (run * samples + piece) * pass.time + tokens;
      kernels::fill_zero(pass.engine.compute_stream(), rows.slice(first * of_token, count * of_token));
    }
  }
}

void copy_local_tokens(const Pass& pass, const ConstTensorView& whole, const TensorView& local) {
  for (int run = 0; run < pass.runs(); ++run) {
    const std::int64_t tokens = pass.tokens_of_run(run);
    if (tokens == 0) continue;
    kernels::copy_columns(pass.engine.compute_stream(), whole, pass.first_of_run(run),
                          rows_of_run(pass, local, run), 0, tokens);
  }
}

LocalBatch::LocalBatch(Pass& pass, const TokenBatch& batch) : tokens_(batch.tokens), targets_(batch.targets) {
  if (pass.context == nullptr) return;
  const TensorRequest numbers{DataType::int32, {pass.batch, pass.time}};
  memory_ = StepTensors(pass.engine, Category::activations, "tokens of this rank",
                        {numbers, numbers, {DataType::int32, {batch.positions ? pass.batch : 0, pass.time}}});
  if (pass.padded()) {
    kernels::fill_zero(pass.engine.compute_stream(), memory_[0]);
    kernels::fill_zero(pass.engine.compute_stream(), memory_[2]);
    const std::vector<std::int32_t> no_targets(static_cast<std::size_t>(pass.rows()), kernels::ignored_label);
    pass.engine.device().copy_from_host(pass.engine.compute_stream(), memory_[1].data, no_targets.data(),
                                        memory_[1].bytes());
  }
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
