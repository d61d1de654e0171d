#pragma once
/// The record that ranks exchange at the end of a step. Private to engine/.

#include <cstdint>

namespace tranche::detail {

/// The record that each rank sends all others at the end of a step, after its sums of squares by flat buffer.
struct StepRecord {
  double loss_sum = 0;
  std::int64_t tokens = 0;
  std::int64_t non_finite_buffer =
      -1;  ///< first trainable buffer with an infinity or NaN in this rank's shard
  std::int64_t non_finite_element = -1;  ///< its position in the flat buffer
  std::uint64_t sequence_hash = 0;
  std::int64_t save_at_rest = 1;  ///< 0: this rank's part of a save is being written
  std::int64_t stop_requested = 0;
  double learning_rate = 0, momentum = 0;  ///< the rates of this rank's update
  std::int64_t has_hook = 0;
};

}  // namespace tranche::detail
