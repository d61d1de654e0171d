#pragma once
/// The sums of squares of separate gradients of a step, for measuring the gradient's noise. Private to
/// engine/.

#include <cstdint>
#include <span>
#include <vector>

#include "engine/flat_buffer.h"
#include "engine/step_scalars.h"
#include "tranche/comm/communicator.h"
#include "tranche/core/tensor_view.h"
#include "tranche/device/device.h"
#include "tranche/device/step_arena.h"

namespace tranche::detail {

/// Computes the squares when a buffer's gradients are reduced, and sums them at the end of the step.
///
/// Each rank of the axis `tensor` has a part of its data rank's gradient. If the axis cuts a tensor, the
/// parts have different elements, whose squares are added. If several ranks hold a tensor whole, each has an
/// addend of its gradient, so these ranks first sum the gradient, each for a share of its elements.
class PieceStatistics {
 public:
  /// `tensor`: the ranks of the axis; null if it has size 1. All arguments must outlive it.
  PieceStatistics(const StepScalars& scalars, Communicator* tensor, StepArena& arena, Stream& compute)
      : scalars_(scalars), tensor_(tensor), arena_(arena), compute_(compute) {}

  /// If the noise is measured, adds the squares of a data rank's gradient of a whole buffer to piece number
  /// `piece`. Collective over `tensor` if its ranks share the buffer.
  void take(const FlatBuffer& flat, const ConstTensorView& gradient, std::int64_t piece) const;
  /// The sums of squares of each of the first `pieces` pieces over all trainable buffers and all ranks of
  /// `tensor`; collective over these. Infinite if an element is not finite. Waits for the compute stream.
  std::vector<SquareSum> sums(Device& device, std::span<FlatBuffer* const> trainable,
                              std::int64_t pieces) const;
  /// Elements that this rank sends to others in each take() of a buffer.
  static std::int64_t sent_elements(const FlatBuffer& flat);

 private:
  const StepScalars& scalars_;
  Communicator* tensor_;
  StepArena& arena_;
  Stream& compute_;
};

}  // namespace tranche::detail
