#pragma once
/// The residual's rows on a mesh with the axis `tensor`. Its ranks see the same samples and hold a part of
/// each cut layer; outside of cut layers each has rows of its own. With R = ceil(rows / ranks), rank i of the
/// axis holds rows [i R, (i + 1) R) of the micro-batch. Rows behind the last one are padding: finite numbers
/// that no result depends on, and zero in gradients.
///
/// A column layer (its outputs are cut) gathers all rows of its input; a row layer (its inputs are cut) gives
/// a partial sum for all rows, which is added up and scattered. Backward does the opposite. Without the axis
/// neither copies, sends or takes memory.

#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "tranche/core/dtype.h"
#include "tranche/core/tensor_view.h"
#include "tranche/device/memory.h"
#include "tranche/models/language_model.h"
#include "tranche/models/step_tensors.h"

namespace tranche::models {

/// all[r * count ...] = the `count` elements at `own` of rank r of the axis; `own` may be this rank's place
/// in `all`. The compute stream waits for them; memory of another tier than the device's is ready at the
/// call, and waited for by the host. `what` names the message in errors and traces. Collective over the axis;
/// LogicError without it.
void gather_from_ranks(const Pass& pass, std::string_view what, const void* own, void* all,
                       std::int64_t count, DataType dtype, Tier tier = Tier::device);

/// `values` of rank `rank` of the axis on all its ranks. The compute stream waits for them. `what` names the
/// message in errors and traces. Collective over the axis, which there is.
void broadcast_from_rank(const Pass& pass, std::string_view what, int rank, const TensorView& values);

/// All rows of a tensor of which each rank of the axis holds R. Collective over the axis: made by all its
/// ranks in one order. Move-only.
class GatheredRows {
 public:
  GatheredRows() = default;
  /// `local` [R, width] is this rank's; `unit` names the layer in errors and traces. The compute stream waits
  /// for the rows. Throws CommunicationError, OutOfMemory.
  GatheredRows(const Pass& pass, std::string_view unit, const ConstTensorView& local);
  /// [rows, width]; `local` itself without the axis.
  const ConstTensorView& view() const noexcept { return view_; }
  /// The memory behind the view, for WeightGradients::keep(); empty without the axis.
  StepTensors take() noexcept { return std::move(memory_); }

 private:
  StepTensors memory_;
  ConstTensorView view_;
};

/// This rank's addends of a sum over the ranks of the axis, for all rows.
class PartialRows {
 public:
  /// Some rows of the addends, from row `first` on.
  struct Part {
    std::int64_t first = 0;
    TensorView view;  ///< [count, width]
    /// The rows of `all` [rows, n] that are these.
    ConstTensorView rows_of(const ConstTensorView& all) const;
  };

  /// Memory for the addends of `sum` [R, width].
  PartialRows(const Pass& pass, const TensorView& sum);
  /// [rows, width], to be written whole; `sum` itself without the axis.
  const TensorView& view() const noexcept { return view_; }
  /// All rows in parts, to be written instead of view(). This rank's own rows never travel, so that 16-bit
  /// sums take them in fp32: its rows are a part of their own then, between those of the ranks before and
  /// behind it, and scatter() rounds them once, as part of the sum. Otherwise there is one part, view().
  std::span<const Part> parts();
  /// The view holds the sum over the ranks already, as a chain leaves it on all of them: scatter() sends
  /// nothing then.
  void mark_complete() noexcept { complete_ = true; }
  /// sum = this rank's rows of the sum over the ranks: in fp32 and rank order, rounded once to the dtype.
  /// Where this rank's own rows are in fp32 (parts()) the sum begins with them. Releases the memory.
  /// Collective over the axis, whose ranks all write view() or all parts(). Throws CommunicationError.
  void scatter(std::string_view unit);

 private:
  const Pass& pass_;
  TensorView sum_, view_;
  std::vector<Part> parts_;
  StepTensors memory_, own_;
  bool complete_ = false;
};

}  // namespace tranche::models
