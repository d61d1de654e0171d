#pragma once
/// Fused optimizer updates of a range of a flat buffer, all its tensors at once: one pass reads the gradient,
/// updates master and moments in place and writes the compute-dtype weight. Arithmetic (bit-equal on
/// every instruction set): separate multiplies and adds in fp32, IEEE division and square root, no flush to
/// zero. matmul.h says how calls run and how long operands stay valid.

#include <cstddef>
#include <cstdint>
#include <span>

#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"
#include "tranche/kernels/master_weights.h"
#include "tranche/kernels/update_rule.h"

namespace tranche::kernels {

/// Elements [first, first + count) of the range, which are updated with the arguments of `group`.
struct UpdateSegment {
  std::int64_t first = 0, count = 0;
  int group = 0;
  /// For rules with a trust ratio: `partial` points to where RulePhase::advance adds the squares of weights
  /// and of directions; `sums` are their sums over whole tensors, which RulePhase::finish reads. There are
  /// two of each, in memory that the stream's work may access.
  SquareSum* partial = nullptr;
  const double* sums = nullptr;
  /// For stochastic rounding: the tensor that keys the draws, and the segment's first element in it.
  std::uint64_t tensor = 0;
  std::int64_t first_element = 0;
};

/// The arguments of each group, `stride` bytes apart, in memory that the stream's work may read (device
/// memory on cuda streams). They are read when the update runs, not when it is issued, so that a captured
/// graph replays with new numbers; they must not change until the update has run.
template <class Arguments>
struct GroupArguments {
  const Arguments* first = nullptr;
  int groups = 1;
  std::int64_t stride = sizeof(Arguments);

  const Arguments& operator[](int group) const {
    return *reinterpret_cast<const Arguments*>(reinterpret_cast<const std::byte*>(first) + group * stride);
  }
};

/// The operands of any rule's update.
struct RuleOperands {
  const std::byte* arguments = nullptr;  ///< UpdateRule::arguments() of each group, as GroupArguments
  int groups = 1;
  std::int64_t stride = 0;
  unsigned slots = 0;  ///< the states that are kept
  std::span<const UpdateSegment> segments;
  ConstTensorView gradient;
  /// fp32; bf16; or uint16, the lower halves of numbers whose upper halves are the bf16 `weight`
  /// (master_weights.h).
  TensorView master;
  std::span<const TensorView> state;  ///< the states in `slots`, in ascending order
  /// Written from the master. Its data is null if the master is the weight, and in RulePhase::advance unless
  /// the master is uint16.
  TensorView weight;
  WeightRounding rounding = WeightRounding::nearest_even;  ///< of `weight` and of a bf16 master
  /// For stochastic rounding. Like `arguments`, it is in memory of the stream and read when the update runs.
  const RoundingKey* rounding_key = nullptr;
};
/// Updates the segments by a rule, in one go or one phase of it; adam_update() documents the requirements on
/// operands.
void rule_update(Stream& stream, const UpdateRule& rule, RulePhase phase, const RuleOperands& operands);

/// All rules in kernels/rules/, in the order of their file names.
std::span<const UpdateRule* const> built_in_rules();
/// The rules that CMake's tranche_add_optimizer added to this program; empty by default.
std::span<const UpdateRule* const> rules_of_program();

/// Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019). With g = gradient * gradient_scale:
/// decoupled: w = w - (learning_rate * weight_decay) * w, else g = g + weight_decay * w; then m = beta1 m +
/// (1 - beta1) g; v = beta2 v + ((1 - beta2) g) g; w = w - step_size * (m / (sqrt(v) + corrected_epsilon)),
/// where step_size = learning_rate * sqrt(1 - beta2^t) / (1 - beta1^t) and corrected_epsilon = epsilon *
/// sqrt(1 - beta2^t) are computed in double and rounded to fp32. Both bias corrections use the order of
/// section 2 of the paper, which saves a division per element.
struct AdamArguments {
  float learning_rate = 0, beta1 = 0.9f, beta2 = 0.999f, weight_decay = 0;
  float step_size = 0, corrected_epsilon = 1e-8f;
  float gradient_scale = 1;
  bool decoupled = true;
  bool apply = true;  ///< false: the update is masked (a skipped step); nothing is written
};
/// Updates the segments in one pass, in which threads share the whole range however short its segments are; a
/// GPU takes one launch per 76 segments. The views cover the whole range with equal element counts: gradient
/// any floating dtype; master fp32; exp_avg and exp_avg_sq fp32 or bf16; weight is the compute-dtype copy to
/// write, or a view with null data when master itself is the weight. Segments ascend, do not overlap and lie
/// within the range: InvalidArgument names one that does not. The list is copied. Elements outside of all
/// segments are neither read nor written, and neither are those of a group whose `apply` is false.
void adam_update(Stream& stream, const GroupArguments<AdamArguments>& arguments,
                 std::span<const UpdateSegment> segments, const ConstTensorView& gradient,
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
/// Like adam_update. A momentum_buffer with null data means no momentum, whatever the arguments contain. The
/// cost model counts a step that is neither the first nor nesterov.
void sgd_update(Stream& stream, const GroupArguments<SgdArguments>& arguments,
                std::span<const UpdateSegment> segments, const ConstTensorView& gradient,
                const TensorView& master, const TensorView& momentum_buffer, const TensorView& weight);

}  // namespace tranche::kernels
