#pragma once
/// Fused optimizer updates over a stretch of a shard: one pass reads the gradient, updates fp32 master and
/// moments in place and writes the compute-dtype weight. Arithmetic (bit-equal on every instruction set):
/// separate multiplies and adds in fp32, IEEE division and square root, no flush to zero.

#include <cstdint>
#include <span>

#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"

namespace tranche::kernels {

/// Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019). With g = gradient * gradient_scale:
/// decoupled: w = w - (learning_rate * weight_decay) * w, else g = g + weight_decay * w; then
/// m = beta1 m + (1 - beta1) g; v = beta2 v + ((1 - beta2) g) g;
/// w = w - step_size * (m / (sqrt(v) + corrected_epsilon)), where step_size = learning_rate *
/// sqrt(1 - beta2^t) / (1 - beta1^t) and corrected_epsilon = epsilon * sqrt(1 - beta2^t) are computed in
/// double and rounded to fp32: both bias corrections in the order of section 2 of the paper, which spares
/// each element a division.
struct AdamArguments {
  float learning_rate = 0, beta1 = 0.9f, beta2 = 0.999f, weight_decay = 0;
  float step_size = 0, corrected_epsilon = 1e-8f;
  float gradient_scale = 1;
  bool decoupled = true;
  bool apply = true;  ///< false: the update is masked (a skipped step); nothing is written
};
/// gradient any floating dtype; master fp32; exp_avg and exp_avg_sq fp32 or bf16; weight is the compute-dtype
/// copy to write, or a view with null data when master itself is the weight. Equal element counts.
void adam_update(Stream& stream, const AdamArguments& arguments, const ConstTensorView& gradient,
                 const TensorView& master, const TensorView& exp_avg, const TensorView& exp_avg_sq,
                 const TensorView& weight);
/// The same with the arguments in device memory, read when the update runs and not when it is issued: what a
/// captured graph replays, and what lets another kernel decide on `apply`. The same bits as the call above;
/// it is issued and counted whatever `apply` says. The struct stays as it is until the update has run.
void adam_update(Stream& stream, const AdamArguments* device_arguments, const ConstTensorView& gradient,
                 const TensorView& master, const TensorView& exp_avg, const TensorView& exp_avg_sq,
                 const TensorView& weight);

/// Stochastic gradient descent with momentum as PyTorch defines it: g = gradient * gradient_scale +
/// weight_decay * w; b = momentum * b + (1 - dampening) * g (b = g in the first step); d = nesterov ?
/// g + momentum * b : b (d = g without momentum); w = w - learning_rate * d.
struct SgdArguments {
  float learning_rate = 0, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false;
  bool first_step = false;
  float gradient_scale = 1;
  bool apply = true;
};
/// momentum_buffer has null data when momentum is 0.
void sgd_update(Stream& stream, const SgdArguments& arguments, const ConstTensorView& gradient,
                const TensorView& master, const TensorView& momentum_buffer, const TensorView& weight);
/// The same with the arguments in device memory, as adam_update above. A momentum_buffer with null data means
/// no momentum, whatever the arguments say. Counted as a step that is neither the first nor nesterov.
void sgd_update(Stream& stream, const SgdArguments* device_arguments, const ConstTensorView& gradient,
                const TensorView& master, const TensorView& momentum_buffer, const TensorView& weight);

/// Elements [first, first + count) of a stretch that are updated with the arguments at `group` of a list.
struct UpdateSegment {
  std::int64_t first = 0, count = 0;
  int group = 0;
};
/// adam_update over the segments of one stretch, each with the arguments of its group: the same bits as a
/// call for each segment, but one pass, whose threads share the whole stretch however short its segments are
/// (on a GPU one launch for each segment). The views are the whole stretch's; elements outside of all
/// segments are neither read nor written. Both lists are copied. Segments ascend, do not overlap and lie
/// within the stretch: InvalidArgument names the one that does not. Segments of a group whose `apply` is
/// false are left alone.
void adam_update_segments(Stream& stream, std::span<const AdamArguments> groups,
                          std::span<const UpdateSegment> segments, const ConstTensorView& gradient,
                          const TensorView& master, const TensorView& exp_avg, const TensorView& exp_avg_sq,
                          const TensorView& weight);
/// sgd_update over the segments of one stretch, as adam_update_segments.
void sgd_update_segments(Stream& stream, std::span<const SgdArguments> groups,
                         std::span<const UpdateSegment> segments, const ConstTensorView& gradient,
                         const TensorView& master, const TensorView& momentum_buffer,
                         const TensorView& weight);

}  // namespace tranche::kernels
