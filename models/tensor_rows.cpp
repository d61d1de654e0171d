#include "tranche/models/tensor_rows.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <string>

#include "models/pass_messages.h"
#include "tranche/comm/communicator.h"
#include "tranche/core/error.h"
#include "tranche/engine/engine.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/embedding.h"

namespace tranche::models {

namespace {

std::string rows_of(std::string_view unit) {
  return fmt::format("rows of {}", unit);
}

/// Memory for R rows of every rank.
StepTensors acquire_rows(const Pass& pass, std::string_view tag, DataType dtype, std::int64_t width) {
  return {
      pass.engine, Category::activations, tag, {{dtype, {pass.tensor_ranks() * pass.local_rows(), width}}}};
}

}  // namespace

int Pass::tensor_ranks() const {
  return tensor == nullptr ? 1 : tensor->size();
}

int Pass::tensor_rank() const {
  return tensor == nullptr ? 0 : tensor->rank();
}

bool Pass::chained() const {
  return tensor != nullptr && engine.config().tensor_sums == TensorSums::chain;
}

std::int64_t Pass::local_rows() const {
  return divide_round_up(rows(), tensor_ranks());
}

DimensionPart Pass::part_of(std::int64_t count) const {
  const std::int64_t ranks = tensor_ranks(), rank = tensor_rank();
  const std::int64_t first = count * rank / ranks;
  return {first, std::max<std::int64_t>(count * (rank + 1) / ranks - first, 1)};
}

Pass Pass::of_layers(std::string_view dimension) const {
  const bool whole = tensor != nullptr && engine.config().leaves_whole(dimension);
  return {.engine = engine,
          .shape = shape,
          .batch = whole ? local_rows() : batch,
          .time = whole ? 1 : time,
          .samples = samples,
          .training = training,
          .cache = cache,
          .sequence = whole ? 1 : sequence,
          .tensor = whole ? nullptr : tensor,
          .context = whole ? nullptr : context,
          .all_rows = whole && chained() ? this : nullptr};
}

std::int64_t Pass::first_token() const {
  return tensor == nullptr ? kernels::whole_vocabulary : part_of(shape.vocabulary).first;
}

void gather_from_ranks(const Pass& pass, std::string_view what, const void* own, void* all,
                       std::int64_t count, DataType dtype, Tier tier) {
  if (pass.tensor == nullptr)
    throw LogicError("parts of ranks are gathered on a mesh without the axis tensor");
  const PassLabel label(pass, what);
  if (tier != Tier::device) {
    pass.tensor->all_gather(own, all, count, dtype, 0, {}, label.label(tier)).wait();
    return;
  }
  const std::array<Event, 1> ready{pass.engine.compute_stream().record()};
  wait_for(pass, pass.tensor->all_gather(own, all, count, dtype, 0, ready, label.label()));
}

void broadcast_from_rank(const Pass& pass, std::string_view what, int rank, const TensorView& values) {
  const PassLabel label(pass, what);
  const std::array<Event, 1> ready{pass.engine.compute_stream().record()};
  wait_for(pass,
           pass.tensor->broadcast(values.data, values.elements(), values.dtype, rank, ready, label.label()));
}

GatheredRows::GatheredRows(const Pass& pass, std::string_view unit, const ConstTensorView& local)
    : view_(local) {
  if (pass.tensor == nullptr) return;
  const std::int64_t width = local.shape[1];
  memory_ = acquire_rows(pass, "gathered rows", local.dtype, width);
  gather_from_ranks(pass, rows_of(unit), local.data, memory_[0].data, local.elements(), local.dtype);
  view_ = memory_[0].slice(0, pass.rows() * width).reshaped({pass.rows(), width});
}

PartialRows::PartialRows(const Pass& pass, const TensorView& sum) : pass_(pass), sum_(sum), view_(sum) {
  if (pass.tensor == nullptr) return;
  const std::int64_t width = sum.shape[1];
  memory_ = acquire_rows(pass, "partial rows", sum.dtype, width);
  view_ = memory_[0].slice(0, pass.rows() * width).reshaped({pass.rows(), width});
}

void PartialRows::scatter(std::string_view unit) {
  if (pass_.tensor == nullptr) return;
  Stream& stream = pass_.engine.compute_stream();
  const TensorView& all = memory_[0];
  const std::int64_t padding = all.elements() - view_.elements();
  if (padding > 0) kernels::fill_zero(stream, all.slice(view_.elements(), padding));
  if (complete_) {
    kernels::copy(stream, all.slice(pass_.tensor_rank() * sum_.elements(), sum_.elements()), sum_);
    return memory_.release();
  }
  const PassLabel label(pass_, rows_of(unit));
  const std::array<Event, 1> ready{stream.record()};
  wait_for(pass_, pass_.tensor->reduce_scatter(all.data, all.dtype, sum_.data, sum_.dtype, sum_.elements(),
                                               {}, ready, label.label()));
  memory_.release();
}

}  // namespace tranche::models
