#pragma once
/// The squares of gradients that are reduced apart, for the noise of a step's gradient. Private to engine/.

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

/// Takes them where a buffer's gradients are reduced, and adds them up at the step's end.
///
/// Each rank of the axis `tensor` has a part of its data rank's gradient. The parts of a tensor that the axis
/// cuts are different elements, whose squares add up. A tensor that several ranks hold whole gets an addend
/// from each of them, so that they add it up first, each a share of its elements.
class PieceStatistics {
 public:
  /// `tensor`: the ranks of the axis; null where that is 1. All arguments outlive it.
  PieceStatistics(const StepScalars& scalars, Communicator* tensor, StepArena& arena, Stream& compute)
      : scalars_(scalars), tensor_(tensor), arena_(arena), compute_(compute) {}

  /// Takes the squares of a whole buffer's gradient, which is a data rank's, into those of piece number
  /// `piece`, where the noise is measured. Collective over `tensor` where ranks of it share the buffer.
  void take(const FlatBuffer& flat, const ConstTensorView& gradient, std::int64_t piece) const;
  /// The squares of each of the first `pieces` pieces over all trainable buffers and all ranks of `tensor`,
  /// over which it is collective. Infinite where an element is not finite. Waits for the compute stream.
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
