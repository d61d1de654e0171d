#pragma once
/// The public optimizer interface. An optimizer knows ranges of flat buffers; it knows no ranks and no units.

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

/// A step as the optimizer sees it.
struct OptimizerStep {
  std::int64_t step = 1;     ///< 1 for the first applied update, counts applied updates only
  double learning_rate = 0;  ///< from the schedule, before group factors
  double momentum = -1;      ///< of schedules that cycle it (beta1 for Adam); negative: the optimizer's own
  float gradient_scale = 1;  ///< multiplies every gradient: clip / (loss scale * tokens)
  bool apply = true;         ///< false: masked (skipped step); nothing may change
};

/// Per-group settings, resolved for a tensor.
struct GroupOptions {
  double learning_rate_factor = 1;
  bool decay = true;  ///< false: weight decay is taken as 0
  // Values of the group's own; what is not set is the schedule's or the optimizer's.
  std::optional<double> learning_rate = {};  ///< the same in every step; the factor multiplies it too
  std::optional<double> weight_decay = {};
  std::optional<std::array<double, 2>> betas = {};  ///< also in place of a momentum that a schedule cycles
  std::optional<double> epsilon = {};
  /// The rate of the group's tensors in a step.
  double rate(const OptimizerStep& step) const {
    return learning_rate.value_or(step.learning_rate) * learning_rate_factor;
  }
  friend bool operator==(const GroupOptions&, const GroupOptions&) = default;
};

/// A tensor as a rule sees it; the same on every rank.
struct TrainableTensor {
  std::string_view name;
  Shape shape;
  GroupOptions group;
  int matrices = 0;            ///< hidden matrices side by side along its outputs; 0: it is none
  bool outputs_first = false;  ///< stored [out, in]
};

/// The work of Optimizer::whole() on a tensor.
struct MatrixWork {
  double operations = 0;
  std::int64_t scratch_bytes = 0;
};

/// The part of one tensor that lies in a range of a flat buffer.
struct TensorSegment {
  std::int64_t first = 0, count = 0;  ///< elements of the range, from its begin
  const TrainableTensor* tensor = nullptr;
  std::uint64_t index = 0;         ///< of the tensor in the model
  std::int64_t first_element = 0;  ///< of this part within its tensor
  int group = 0;                   ///< index of its group's numbers
  SquareSum* partial = nullptr;    ///< of its tensor, Optimizer::sums() of them, in prepare()
  const double* sums = nullptr;    ///< what they come to over all ranks, rounded once, in apply()
};

/// A range of a flat buffer: all that a rank updates of it, or a tile of that. Addresses are of memory that
/// the stream's work may read and write; on a device that is not the host's, host code may not.
struct UpdateRange {
  ConstTensorView gradient;       ///< accumulation dtype; still to be multiplied by gradient_scale
  TensorView master;              ///< fp32, or another format where takes_master_formats()
  std::vector<TensorView> state;  ///< in the order of Optimizer::state()
  /// The compute-dtype copy to write; null data when master is the weight, and in prepare() unless master is
  /// its lower half.
  TensorView weight;
  /// From new values to the weight, and to a master that is not fp32, as kernels::RuleOperands has them.
  kernels::WeightRounding rounding = kernels::WeightRounding::nearest_even;
  const kernels::RoundingKey* rounding_key = nullptr;
  /// Of tensors that are computed as whole matrices: bf16, written by prepare(), and in apply() what whole()
  /// has made of it; and fp32 of no meaning that prepare() may overwrite.
  TensorView message, scratch;
  /// In ascending order; what lies between them is padding, which is neither read nor written. Together with
  /// the tensors that it names the list is the caller's, and valid until the call returns.
  std::span<const TensorSegment> segments;
  /// Optimizer::numbers() of this step for each group, `numbers_stride` bytes apart. Read when the work runs.
  const std::byte* numbers = nullptr;
  std::int64_t numbers_stride = 0;
  int groups = 1;

  /// The memory of a segment: the views alone.
  UpdateRange part(const TensorSegment& segment) const;
};

/// An optimizer's update rule. Stateless over calls: what it remembers is in the state tensors and
/// OptimizerStep, so it is sharded, offloaded and checkpointed by the engine. At the end of a step all ranks
/// agree on norm, clipping and scale; then the engine calls, in a fixed order, prepare() for rules with sums,
/// exchanges these, and calls apply(). In a skipped step (OptimizerStep::apply is false) it calls the same,
/// and nothing may change.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  virtual std::string name() const = 0;
  /// The state kept for every element of a tensor. Tensors of a unit with the same states, and the same
  /// answer to needs_whole_matrices(), share a flat buffer; each class of them is one collective more.
  virtual std::vector<OptimizerStateTensor> state(const TrainableTensor& tensor) const = 0;
  /// Throws InvalidArgument when this rule cannot honour what the group sets; the engine asks once for each
  /// tensor, at the start. Unless a rule overrides this, values of the group's own are refused by name, as
  /// apply() would pass over them in silence.
  virtual void check_group(const GroupOptions& group) const;
  /// The kernels' scalars of a step that are the same for all elements of a group (rate, bias corrections),
  /// as bytes that the rule's kernels read; of one size for all steps and groups. A rule that has them, and
  /// takes nothing else of OptimizerStep in apply(), is the same work in every step, which a device may
  /// record once and replay. Rules without are issued anew with the OptimizerStep that they are given.
  virtual std::vector<std::byte> numbers(const OptimizerStep&, const GroupOptions&) const { return {}; }

  /// How many reductions over all of a tensor's elements the rule needs (LAMB's norms of weight and update:
  /// two); 0 for most.
  virtual int sums(const TrainableTensor&) const { return 0; }
  /// Before apply(), for rules with sums: may change state, and adds each segment's share to `partial` of the
  /// segment, which begin at zero. The gradient's true scale is known. These sums have no rounding: squares
  /// of fp32 numbers are exact in fp64, so neither the cut in shards nor the mesh changes a bit of them. A
  /// summand that is not finite is add_infinity(). `range` is all that this rank updates of a flat buffer, or
  /// a tile of that on NVMe. Where several ranks keep the same elements, segments also end at the begin and
  /// end of the rank's own shard, and only that shard's sums count.
  virtual void prepare(Stream&, const OptimizerStep&, const UpdateRange& /*range*/) const {}
  /// True for tensors that one rank must compute whole from what prepare() left (Muon): prepare() writes the
  /// range's `message`, the rank that owns the tensor gets all of it, calls whole(), and sends every rank the
  /// part that its apply() updates. Such tensors have no sums. Ranges are of one tensor each then, and what
  /// apply() and prepare() do is not replayed.
  virtual bool needs_whole_matrices(const TrainableTensor&) const { return false; }
  virtual MatrixWork whole_work(const TrainableTensor&) const { return {}; }
  /// `message`: bf16, the tensor's elements, overwritten. Not called in a skipped step. The scratch is as
  /// large as whole_work() says.
  virtual void whole(Stream&, const OptimizerStep&, const TrainableTensor&, const TensorView& /*message*/,
                     const kernels::Workspace& /*scratch*/) const {}
  /// The way in which a rule updates each of the model's trainable tensors, for the table of the start; empty
  /// where it is the same for all. Throws InvalidArgument where it has nothing to do.
  virtual std::string routing(std::span<const TrainableTensor>) const { return {}; }

  /// Updates all segments of the range; `sums` of a segment are those of all ranks, the same for each of a
  /// tensor's segments. Ordered on `stream`: when the enqueued work is done every write, also a non-temporal
  /// one, can be seen by whoever waits for an event recorded after it.
  virtual void apply(Stream& stream, const OptimizerStep& step, const UpdateRange& range) const = 0;
  /// Hyper-parameters as JSON text, for reports and checkpoints.
  virtual std::string describe() const = 0;
  /// True for a rule that hands `master`, `weight` and the rounding of a range on to a kernel that takes all
  /// formats of RuleOperands::master; the engine refuses tranche.master for others.
  virtual bool takes_master_formats() const { return false; }
};

/// The value for Optimizer::numbers() to return where the numbers are kept in one structure.
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
/// State "exp_avg" and "exp_avg_sq". Throws InvalidArgument on betas outside [0, 1), a negative epsilon or
/// decay, or moments that are neither fp32, bf16 nor block8.
std::unique_ptr<Optimizer> make_adam(const AdamOptions& options);

struct SgdOptions {
  double momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false;
};
/// State "momentum_buffer" (fp32) unless momentum is 0. Throws InvalidArgument on a negative momentum or
/// decay, or Nesterov's form without momentum or with dampening.
std::unique_ptr<Optimizer> make_sgd(const SgdOptions& options);

}  // namespace tranche
