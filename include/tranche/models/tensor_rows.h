#pragma once
/// The residual's rows on a mesh with the axis `tensor`. Its ranks see the same samples and hold a part of
/// each cut layer; outside of cut layers each rank has its own rows. With R = ceil(rows / ranks), rank i of
/// the axis holds rows [i R, (i + 1) R) of the micro-batch. Rows after the last one are padding: finite
/// numbers on which no result depends, and zero in gradients.
///
/// A column layer, whose outputs are cut, gathers all rows of its input. A row layer, whose inputs are cut,
/// computes a partial sum for all rows; the partial sums are reduced and scattered. Backward does the
/// opposite. Without the axis these classes copy, send and allocate nothing.

#include <cstdint>
#include <string_view>
#include <utility>

#include "tranche/core/dtype.h"
#include "tranche/core/tensor_view.h"
#include "tranche/device/memory.h"
#include "tranche/models/language_model.h"
#include "tranche/models/step_tensors.h"

namespace tranche::models {

/// all[r * count ...] = the `count` elements at `own` of rank r of the axis; `own` may be this rank's place
/// in `all`. The compute stream waits for them. For memory of another tier than the device's, the elements
/// must be ready at the call, and the host waits. Errors and traces name the message as `what`. Collective
/// over the axis; throws LogicError without it.
void gather_from_ranks(const Pass& pass, std::string_view what, const void* own, void* all,
                       std::int64_t count, DataType dtype, Tier tier = Tier::device);

/// Broadcasts `values` of rank `rank` of the axis to all its ranks. The compute stream waits for them. Errors
/// and traces name the message as `what`. Collective over the axis, which must exist.
void broadcast_from_rank(const Pass& pass, std::string_view what, int rank, const TensorView& values);

/// All rows of a tensor of which each rank of the axis holds R. Collective over the axis: all its ranks
/// construct them in the same order. Move-only.
class GatheredRows {
 public:
  GatheredRows() = default;
  /// `local` [R, width] has this rank's rows; errors and traces name the layer as `unit`. The compute stream
  /// waits for the rows. Throws CommunicationError, OutOfMemory.
  GatheredRows(const Pass& pass, std::string_view unit, const ConstTensorView& local);
  /// [rows, width]; `local` itself without the axis.
  const ConstTensorView& view() const noexcept { return view_; }
  /// Moves out the view's memory, for WeightGradients::keep(); empty without the axis.
  StepTensors take() noexcept { return std::move(memory_); }

 private:
  StepTensors memory_;
  ConstTensorView view_;
};

/// This rank's addends, for all rows, of a sum over the ranks of the axis.
class PartialRows {
 public:
  /// Allocates the addends of `sum` [R, width].
  PartialRows(const Pass& pass, const TensorView& sum);
  /// [rows, width], which must be written completely; `sum` itself without the axis.
  const TensorView& view() const noexcept { return view_; }
  /// Declares that the view already holds the sum over the ranks, as chained sums leave it on all of them;
  /// scatter() then sends nothing.
  void mark_complete() noexcept { complete_ = true; }
  /// sum = this rank's rows of the sum over the ranks, computed in fp32 and rank order, and rounded once to
  /// the dtype. Releases the memory. Collective over the axis. Throws CommunicationError.
  void scatter(std::string_view unit);

 private:
  const Pass& pass_;
  TensorView sum_, view_;
  StepTensors memory_;
  bool complete_ = false;
};

}  // namespace tranche::models
