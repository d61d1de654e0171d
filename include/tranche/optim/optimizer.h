#pragma once
/// The public optimizer interface. An optimizer works on ranges of flat buffers; it knows neither ranks nor
/// units.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "tranche/core/exact_sum.h"
#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"
#include "tranche/kernels/master_weights.h"
#include "tranche/kernels/workspace.h"

namespace tranche {

/// A state tensor that the engine keeps for every element of a trainable tensor.
struct OptimizerStateTensor {
  std::string name;  ///< "exp_avg"
  DataType dtype = DataType::float32;
  float initial_value = 0;
  friend bool operator==(const OptimizerStateTensor&, const OptimizerStateTensor&) = default;
};

/// The facts of a step that an optimizer needs.
struct OptimizerStep {
  std::int64_t step = 1;     ///< 1 for the first applied update, counts applied updates only
  double learning_rate = 0;  ///< from the schedule, before group factors
  double momentum = -1;      ///< from schedules that cycle it (beta1 for Adam); negative: the optimizer's own
  float gradient_scale = 1;  ///< multiplies every gradient: clip / (loss scale * tokens)
  bool apply = true;         ///< false: masked (skipped step); nothing may change
};

/// The settings of a parameter group, resolved for a tensor.
struct GroupOptions {
  double learning_rate_factor = 1;
  bool decay = true;  ///< false: weight decay is taken as 0
  // The group's own values; where one is not set, the schedule's or the optimizer's value applies.
  std::optional<double> learning_rate = {};  ///< constant over steps; the factor multiplies it too
  std::optional<double> weight_decay = {};
  std::optional<std::array<double, 2>> betas = {};  ///< also replace a momentum that a schedule cycles
  std::optional<double> epsilon = {};
  /// The learning rate of the group's tensors in a step.
  double rate(const OptimizerStep& step) const {
    return learning_rate.value_or(step.learning_rate) * learning_rate_factor;
  }
  friend bool operator==(const GroupOptions&, const GroupOptions&) = default;
};

/// The facts about a tensor that a rule may use; the same on every rank.
struct TrainableTensor {
  std::string_view name;
  Shape shape;
  GroupOptions group;
  int matrices = 0;            ///< hidden matrices side by side along its outputs; 0: not a matrix
  bool outputs_first = false;  ///< stored [out, in]
};

/// The cost of Optimizer::whole() for a tensor.
struct MatrixWork {
  double operations = 0;
  std::int64_t scratch_bytes = 0;
};

/// The part of one tensor that lies in a range of a flat buffer.
struct TensorSegment {
  std::int64_t first = 0, count = 0;  ///< elements within the range
  const TrainableTensor* tensor = nullptr;
  std::uint64_t index = 0;         ///< the tensor's index in the model
  std::int64_t first_element = 0;  ///< this part's first element within its tensor
  int group = 0;                   ///< index of the group's numbers
  SquareSum* partial = nullptr;    ///< the tensor's Optimizer::sums() partial sums, in prepare()
  const double* sums = nullptr;    ///< these sums over all ranks, rounded once, in apply()
};

/// A range of a flat buffer: everything that a rank updates of it, or one tile. The addresses are of memory
/// that the stream's work may access; on a device with its own memory, host code may not.
struct UpdateRange {
  ConstTensorView gradient;       ///< accumulation dtype, not yet multiplied by gradient_scale
  TensorView master;              ///< fp32, or another format where takes_master_formats()
  std::vector<TensorView> state;  ///< in the order of Optimizer::state()
  /// The compute-dtype copy to write. Its data is null when master is the weight, and in prepare() unless
  /// master is its lower half.
  TensorView weight;
  /// The rounding of new values to the weight, and to a master that is not fp32, as in kernels::RuleOperands.
  kernels::WeightRounding rounding = kernels::WeightRounding::nearest_even;
  const kernels::RoundingKey* rounding_key = nullptr;
  /// For tensors that are computed as whole matrices. `message` is fp32 where the compute dtype is, otherwise
  /// bf16: prepare() writes it, and in apply() it holds the result of whole(). `scratch` is fp32 memory that
  /// prepare() may overwrite.
  TensorView message, scratch;
  /// Segments in ascending order; between them lies padding, which is neither read nor written. The list and
  /// the tensors that it names belong to the caller and are valid until the call returns.
  std::span<const TensorSegment> segments;
  /// Optimizer::numbers() of this step for each group, `numbers_stride` bytes apart. Read when the work runs.
  const std::byte* numbers = nullptr;
  std::int64_t numbers_stride = 0;
  int groups = 1;

  /// The memory of one segment: only the views are set.
  UpdateRange part(const TensorSegment& segment) const;
};

/// An optimizer's update rule. It is stateless between calls: its memory is in the state tensors and
/// OptimizerStep, so the engine shards, offloads and checkpoints it. At the end of a step all ranks agree on
/// norm, clipping and scale. Then the engine calls, in a fixed order, prepare() for rules with sums, reduces
/// these over ranks, and calls apply(). In a skipped step (OptimizerStep::apply is false) it makes the same
/// calls, and nothing may change.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  virtual std::string name() const = 0;
  /// The state kept for every element of a tensor. Tensors of a unit with the same states, and the same
  /// answer to needs_whole_matrices(), share a flat buffer; each such class costs one more collective.
  virtual std::vector<OptimizerStateTensor> state(const TrainableTensor& tensor) const = 0;
  /// Throws InvalidArgument when this rule cannot honour a setting of the group; the engine calls it once for
  /// each tensor, at the start. Unless a rule overrides this, the group's own values are refused by name,
  /// because apply() would silently ignore them.
  virtual void check_group(const GroupOptions& group) const;
  /// The kernels' scalars of a step that are the same for all elements of a group (rate, bias corrections),
  /// as bytes that the rule's kernels read; their size is the same for all steps and groups. A rule that has
  /// them, and uses nothing else of OptimizerStep in apply(), issues the same work in every step, which a
  /// device may record once and replay. Rules without them are issued anew with each OptimizerStep.
  virtual std::vector<std::byte> numbers(const OptimizerStep&, const GroupOptions&) const { return {}; }

  /// The number of reductions over all of a tensor's elements that the rule needs (LAMB's norms of weight and
  /// update: two); 0 for most rules.
  virtual int sums(const TrainableTensor&) const { return 0; }
  /// Called before apply(), for rules with sums. It may change state, and adds each segment's sums to the
  /// segment's `partial`, which start at zero. The gradient's true scale is known. These sums have no
  /// rounding (squares of fp32 numbers are exact in fp64), so neither sharding nor the mesh changes a bit of
  /// them. A summand that is not finite is recorded by add_infinity(). `range` is everything that this rank
  /// updates of a flat buffer, or one tile on NVMe. Where several ranks keep the same elements, segments also
  /// end at the begin and end of the rank's own shard, and only that shard's sums count.
  virtual void prepare(Stream&, const OptimizerStep&, const UpdateRange& /*range*/) const {}
  /// True for tensors that one rank must compute as a whole from the result of prepare() (Muon): prepare()
  /// writes the range's `message`; the rank that owns the tensor receives all of it, calls whole(), and sends
  /// every rank the part that its apply() updates. Such tensors have no sums. Each range then holds one
  /// tensor, and the work of apply() and prepare() is not replayed.
  virtual bool needs_whole_matrices(const TrainableTensor&) const { return false; }
  virtual MatrixWork whole_work(const TrainableTensor&) const { return {}; }
  /// Computes `message` in place: the tensor's elements, in the dtype of UpdateRange::message. Not called in
  /// a skipped step. The scratch has the size that whole_work() returns.
  virtual void whole(Stream&, const OptimizerStep&, const TrainableTensor&, const TensorView& /*message*/,
                     const kernels::Workspace& /*scratch*/) const {}
  /// The table at the start, which shows how a rule updates each of the model's trainable tensors; empty if
  /// it treats all alike. Throws InvalidArgument if the rule has no tensor to update.
  virtual std::string routing(std::span<const TrainableTensor>) const { return {}; }

  /// Updates all segments of the range; `sums` of a segment are over all ranks, the same for each of a
  /// tensor's segments. Ordered on `stream`: when the enqueued work is done every write, also a non-temporal
  /// one, is visible to every waiter on an event recorded after it.
  virtual void apply(Stream& stream, const OptimizerStep& step, const UpdateRange& range) const = 0;
  /// Hyper-parameters as the text of a JSON object, for reports and checkpoints.
  virtual std::string describe() const = 0;
  /// True for a rule that passes `master`, `weight` and the rounding of a range to a kernel that supports all
  /// formats of RuleOperands::master; the engine refuses tranche.master for other rules.
  virtual bool takes_master_formats() const { return false; }
};

/// The bytes for Optimizer::numbers() if the numbers are kept in one structure.
template <class Numbers>
std::vector<std::byte> bytes_of_numbers(const Numbers& numbers) {
  static_assert(std::is_trivially_copyable_v<Numbers>);
  std::vector<std::byte> bytes(sizeof(Numbers));
  std::memcpy(bytes.data(), &numbers, sizeof(Numbers));
  return bytes;
}

struct AdamOptions {
  double beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, weight_decay = 0;
  bool decoupled = true;  ///< AdamW; false: Adam with L2
  DataType moment_dtype = DataType::float32;
};
/// Its states are "exp_avg" and "exp_avg_sq". Throws InvalidArgument on betas outside [0, 1), a negative
/// epsilon or decay, or moments that are neither fp32, bf16 nor block8.
std::unique_ptr<Optimizer> make_adam(const AdamOptions& options);

struct SgdOptions {
  double momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false;
};
/// Its state is "momentum_buffer" (fp32) unless momentum is 0. Throws InvalidArgument on a negative momentum
/// or decay, or Nesterov momentum without momentum or with dampening.
std::unique_ptr<Optimizer> make_sgd(const SgdOptions& options);

}  // namespace tranche
