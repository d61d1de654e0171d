#pragma once
/// The public optimizer interface. An optimizer knows stretches of shards; it knows no ranks and no units.

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"

namespace tranche {

/// A state tensor that the engine keeps for every trainable element.
struct OptimizerStateTensor {
  std::string name;  ///< "exp_avg"
  DataType dtype = DataType::float32;
  float initial_value = 0;
};

/// A step as the optimizer sees it.
struct OptimizerStep {
  std::int64_t step = 1;     ///< 1 for the first applied update, counts applied updates only
  double learning_rate = 0;  ///< from the schedule, before group factors
  double momentum = -1;      ///< of schedules that cycle it (beta1 for Adam); negative: the optimizer's own
  float gradient_scale = 1;  ///< multiplies every gradient: clip / (loss scale * tokens)
  bool apply = true;         ///< false: masked (skipped step); nothing may change
};

/// Per-group settings, resolved for a stretch of elements.
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

/// A stretch of one shard that belongs to one tensor and one parameter group.
struct ShardView {
  ConstTensorView gradient;       ///< accumulation dtype
  TensorView master;              ///< fp32
  std::vector<TensorView> state;  ///< in the order of Optimizer::state()
  TensorView weight;              ///< compute-dtype copy to write; null data when master is the weight
  GroupOptions group;
  std::string_view tensor;           ///< name, for rules that depend on it
  std::int64_t first_element = 0;    ///< of the stretch within its tensor
  std::int64_t tensor_elements = 0;  ///< of the whole tensor
};

/// One tensor's part of a longer stretch of a shard (a whole shard, or a tile of one).
struct OptimizerSegment {
  std::int64_t first = 0, count = 0;  ///< elements of the stretch, from its begin
  GroupOptions group;
  std::string_view tensor{};          ///< as in ShardView
  std::int64_t first_element = 0;     ///< as in ShardView: of this part within its tensor
  std::int64_t tensor_elements = 0;   ///< as in ShardView
  std::span<const double> reduced{};  ///< the tensor's statistics over all shards; empty for rules without
};

/// Stateless over calls: everything it remembers is in the state tensors and OptimizerStep, so it is sharded,
/// offloaded and checkpointed by the engine. Called by the engine in a fixed order.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  virtual std::string name() const = 0;
  virtual std::vector<OptimizerStateTensor> state() const = 0;
  /// Throws InvalidArgument when this rule cannot honour what the group sets; the engine asks once for each
  /// tensor, at the start. Unless a rule overrides this, values of the group's own are refused by name, as
  /// apply() would pass over them in silence.
  virtual void check_group(const GroupOptions& group) const;
  /// Number of fp64 statistics per tensor that are summed over all its shards before apply; 0 for most.
  virtual int statistics_per_tensor() const { return 0; }
  /// Adds this stretch's share to `sums` (statistics_per_tensor() values in device memory).
  virtual void statistics(Stream&, const OptimizerStep&, const ShardView&, double* /*sums*/) const {}
  /// Updates the stretch in one pass. `reduced` are the tensor's statistics over all shards.
  virtual void apply(Stream& stream, const OptimizerStep& step, const ShardView& shard,
                     std::span<const double> reduced) const = 0;
  /// Updates all `segments` of one contiguous stretch; the same bits as apply() for each of them. The views
  /// of `stretch` are the whole stretch's (state too; a null weight stays null), its group, tensor,
  /// first_element and tensor_elements are not looked at. Segments ascend, do not overlap and lie within the
  /// stretch, else InvalidArgument is thrown; what lies between them (padding) is neither read nor written.
  /// May be empty. Nothing of `stretch` or `segments` is kept after the call but the tensors' memory. Ordered
  /// on `stream` as apply() is: on return of the enqueued work every write, also a non-temporal one, can be
  /// seen by whoever waits for an event recorded after it. True: done in one pass (AdamW, Adam and SGD: one
  /// unit of work, counted as one kernel; on a GPU one launch for each segment). False: done by one apply()
  /// for each segment, which is what happens unless a rule overrides this.
  virtual bool apply_segments(Stream& stream, const OptimizerStep& step, const ShardView& stretch,
                              std::span<const OptimizerSegment> segments) const;
  /// Bytes of the numbers that an update of one parameter group reads from device memory; 0 for optimizers
  /// that take them from the host in apply(). With them the update is the same work in every step, which a
  /// device may record once and replay.
  virtual std::int64_t argument_bytes() const { return 0; }
  /// Writes the numbers of this step for tensors of `group` to host memory (argument_bytes()).
  virtual void write_arguments(const OptimizerStep&, const GroupOptions&, void* /*arguments*/) const {}
  /// Only asked of optimizers without statistics. As apply(), with the numbers of the shard's group in device
  /// memory, where they are read when the work runs.
  virtual void apply_with(Stream&, const void* /*arguments*/, const ShardView&) const {}
  /// Hyper-parameters as JSON text, for reports and checkpoints.
  virtual std::string describe() const = 0;
};

struct AdamOptions {
  double beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, weight_decay = 0;
  bool decoupled = true;  ///< AdamW; false: Adam with L2
  DataType moment_dtype = DataType::float32;
};
/// State "exp_avg" and "exp_avg_sq". Throws InvalidArgument on betas outside [0, 1), a negative epsilon or
/// decay, or moments that are neither fp32 nor bf16.
std::unique_ptr<Optimizer> make_adam(const AdamOptions& options);

struct SgdOptions {
  double momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false;
};
/// State "momentum_buffer" (fp32) unless momentum is 0. Throws InvalidArgument on a negative momentum or
/// decay, or Nesterov's form without momentum or with dampening.
std::unique_ptr<Optimizer> make_sgd(const SgdOptions& options);

}  // namespace tranche
