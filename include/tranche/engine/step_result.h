#pragma once
#include <cstdint>
#include <string>

#include "tranche/engine/offload_traffic.h"

namespace tranche {

/// The noise of a step's gradient, as a batch size (McCandlish et al., 2018). It is measured with
/// tranche.gradient_noise_scale if at least two gradients were reduced separately, before clipping and
/// without the loss scale.
struct GradientNoise {
  bool measured = false;
  double variance = 0;  ///< unbiased: trace of the covariance of one sample's gradient
  double squares = 0;   ///< unbiased: squared norm of the true gradient; for one step it may be negative
  double scale = 0;     ///< in samples: ratio of the averages of both over steps; infinite unless positive
};

/// The outcome of a step; equal on all ranks except for the seconds.
struct StepResult {
  std::int64_t step = 0;        ///< 1 for the first call of step(); skipped steps are counted too
  bool applied = false;         ///< true when weights were updated
  std::string skipped_because;  ///< empty when applied; names the first non-finite element of the gradient
  double loss = 0;  ///< sum of losses / tokens, over all ranks and micro-batches; NaN if there are no tokens
  double gradient_norm = 0;  ///< global L2 norm of the mean gradient, before clipping
  GradientNoise noise;
  double clip_coefficient = 1;  ///< the clipping factor of the gradients
  double learning_rate = 0;
  double loss_scale = 1;
  std::int64_t tokens = 0;  ///< the tokens in the mean loss, of all ranks and micro-batches
  /// Positions that were computed, with or without a target: samples of the step x
  /// ModelSpec::tokens_per_sample.
  std::int64_t positions = 0;
  double seconds = 0;  ///< from the first begin_micro_batch() to the end of step(), on this rank
  /// With wall_clock_breakdown, otherwise 0: the time of all micro-batches before and after the first
  /// gradients() of each, including the waits of compute.
  double forward_seconds = 0, backward_seconds = 0;
  double exposed_gather_seconds = 0;   ///< waits of compute for parameters
  double exposed_reduce_seconds = 0;   ///< waits of step() for gradients
  double exposed_offload_seconds = 0;  ///< waits of compute or step() for copies, host updates or the disk
  double exposed_message_seconds =
      0;  ///< waits of compute for other pipeline stages and for rows of the axis `tensor`
  double update_seconds = 0;  ///< norm, agreement of the ranks and update, after the gradients were available
  double between_seconds = 0;      ///< from the end of the step before to the first begin_micro_batch()
  OffloadSeconds offload;          ///< busy times of offloading in this step; they overlap
  DiskIdleSeconds disk_idle;       ///< zero without the nvme tier
  OffloadTraffic offload_traffic;  ///< bytes that offloading moved
  std::string saved;            ///< path of the checkpoint that became complete in this step; otherwise empty
  bool stop_requested = false;  ///< a rank called request_stop() before the ranks agreed on this step
};

struct EvaluationResult {
  double loss = 0;          ///< mean over tokens; NaN if there are none
  std::int64_t tokens = 0;  ///< over all ranks and micro-batches
};

}  // namespace tranche
