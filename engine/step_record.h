#pragma once
/// The record that ranks exchange at the end of a step. Private to engine/.

#include <cmath>
#include <cstdint>

#include "tranche/core/exact_sum.h"

namespace tranche::detail {

/// A sum of losses, rounded once; an infinity or NaN makes the whole of it one.
struct LossTotal {
  LossSum finite;
  double not_finite = 0;

  void add(double loss) {
    if (std::isfinite(loss)) {
      finite.add(loss);
    } else {
      not_finite += loss;
    }
  }
  LossTotal& operator+=(const LossTotal& other) {
    finite += other.finite;
    not_finite += other.not_finite;
    return *this;
  }
  double value() const { return finite.value() + not_finite; }
};

/// The record that each rank sends all others at the end of a step.
struct StepRecord {
  SquareSum squares;  ///< of this rank's share of the main gradient
  LossTotal losses;   ///< of its micro-batches
  std::int64_t tokens = 0;
  std::int64_t non_finite_buffer =
      -1;  ///< first trainable buffer with an infinity or NaN in what this rank owns
  std::int64_t non_finite_element = -1;  ///< its position in the flat buffer
  std::uint64_t sequence_hash = 0;       ///< of the calls that all ranks make together
  std::uint64_t group_hash = 0;          ///< of those that the groups of its buffers make
  std::int64_t save_at_rest = 1;         ///< 0: this rank's part of a save is being written
  std::int64_t stop_requested = 0;
  double learning_rate = 0, momentum = 0;  ///< the rates of this rank's update
  std::int64_t has_hook = 0;
};

}  // namespace tranche::detail
