#pragma once
/// The record that ranks exchange at the end of a step. Private to engine/.
///
/// Note: a step's agreement. At the end of a step (engine_step.cpp) all ranks must make the same decision,
/// although each knows only its own part of the gradients:
///
///     every rank   fills a StepRecord: statistics of the gradients that it owns, losses and tokens, hashes
///                  of its collective calls, rates, hook, and whether its save is at rest
///     all ranks    exchange these records (StepBoundary::agree()), and compute the same Agreement from them
///                  in rank order; if there is a gradient hook, they also exchange its answers
///     all ranks    apply the step, or skip it (no tokens, not finite, hook), only from these common values
///
/// A skipped step issues the same work as an applied one, masked, so that later collectives match.

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "tranche/core/exact_sum.h"

namespace tranche::detail {

/// A sum of losses, rounded once; an infinity or NaN makes the sum infinite or NaN.
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
  /// A NaN has no sign, so that it is always printed in the same way.
  double value() const {
    const double sum = finite.value() + not_finite;
    return std::isnan(sum) ? std::numeric_limits<double>::quiet_NaN() : sum;
  }
};

/// The problem with a token count below 0.
inline std::string negative_count(std::int64_t count) {
  return "end_micro_batch() got a token count of " + std::to_string(count) + "; it must be at least 0";
}

/// The record that each rank sends to all others at the end of a step.
struct StepRecord {
  SquareSum squares;        ///< of the main gradient that this rank owns
  LossTotal losses;         ///< of its micro-batches
  std::int64_t tokens = 0;  ///< or the negative count of a micro-batch
  std::int64_t non_finite_buffer =
      -1;  ///< the first trainable buffer in which this rank owns an infinity or NaN
  std::int64_t non_finite_element = -1;  ///< its position in the flat buffer
  std::uint64_t sequence_hash = 0;       ///< of the calls that are collective over all ranks
  std::uint64_t group_hash = 0;          ///< of the calls that are collective over the groups of its buffers
  std::int64_t save_at_rest = 1;         ///< 0: this rank still writes its part of a save
  std::int64_t stop_requested = 0;
  double learning_rate = 0, momentum = 0;  ///< the rates of this rank's update
  std::int64_t has_hook = 0;
};

}  // namespace tranche::detail
