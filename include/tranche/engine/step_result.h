#pragma once
#include <cstdint>
#include <string>

#include "tranche/engine/offload_traffic.h"

namespace tranche {

/// The noise of a step's gradient, as a batch size (McCandlish et al., 2018): with
/// tranche.gradient_noise_scale and two gradients or more that were reduced apart, before clipping, of
/// gradients without the loss scale.
struct GradientNoise {
  bool measured = false;
  double variance = 0;  ///< unbiased: trace of the covariance of one sample's gradient
  double squares = 0;   ///< unbiased: squared norm of the true gradient; of one step it may be below 0
  double scale = 0;     ///< in samples: ratio of the averages of both over steps; infinite where not above 0
};

/// The outcome of a step; equal on all ranks except for the seconds.
struct StepResult {
  std::int64_t step = 0;        ///< 1 for the first call of step(), counts skipped steps too
  bool applied = false;         ///< true when weights were updated
  std::string skipped_because;  ///< empty when applied; names the first non-finite element of the gradient
  double loss =
      0;  ///< sum of losses / tokens, over all ranks and micro-batches; NaN where there are no tokens
  double gradient_norm = 0;  ///< global L2 norm of the mean gradient, before clipping
  GradientNoise noise;
  double clip_coefficient = 1;  ///< factor of the gradients for clipping
  double learning_rate = 0;
  double loss_scale = 1;
  std::int64_t tokens = 0;  ///< that the loss is a mean over, of all ranks and micro-batches
  /// Positions that were computed, learned or not: samples of the step x ModelSpec::tokens_per_sample.
  std::int64_t positions = 0;
  double seconds = 0;  ///< from the first begin_micro_batch() to the end of step(), on this rank
  /// With wall_clock_breakdown, else 0: of all micro-batches, up to the first gradients() of each and from
  /// there, with what compute waited for in them.
  double forward_seconds = 0, backward_seconds = 0;
  double exposed_gather_seconds = 0;   ///< compute waited for parameters
  double exposed_reduce_seconds = 0;   ///< step waited for gradients
  double exposed_offload_seconds = 0;  ///< compute or step waited for copies, host updates or the disk
  double exposed_message_seconds =
      0;  ///< compute waited for other stages of a pipeline and for rows of the axis `tensor`
  double update_seconds = 0;   ///< norm, agreement of the ranks and update, from when gradients were there
  double between_seconds = 0;  ///< from the end of the step before to the first begin_micro_batch()
  OffloadSeconds offload;      ///< time of offloading's parts in this step; they overlap
  DiskIdleSeconds disk_idle;   ///< zero without the nvme tier
  OffloadTraffic offload_traffic;  ///< and what it moved
  std::string saved;               ///< path of the checkpoint that became complete in this step; else empty
  bool stop_requested = false;     ///< some rank's Engine::request_stop() came before this step was agreed on
};

struct EvaluationResult {
  double loss = 0;          ///< of a token; NaN where there are none
  std::int64_t tokens = 0;  ///< over all ranks and micro-batches
};

}  // namespace tranche
