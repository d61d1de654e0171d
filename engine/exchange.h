#pragma once
/// How the gradients and the weights of a flat buffer travel between the ranks that hold it. Private to
/// engine/.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/residency.h"
#include "engine/state_layout.h"
#include "tranche/comm/communicator.h"
#include "tranche/core/tensor_view.h"
#include "tranche/core/trace.h"
#include "tranche/device/device.h"
#include "tranche/device/step_arena.h"

namespace tranche::detail {

/// One reduction of a flat buffer's gradients, whatever their way.
struct GradientSum {
  std::int64_t micro_batch = 0;  ///< says how many ranks have gradients to give
  int group_size = 1;            ///< the order, as in ReductionOptions
  bool accumulate = false;       ///< adds to what the main gradient holds
  bool last = true;              ///< completes the step's gradients
};
/// The same for a communicator of the buffer's group.
ReductionOptions options_of(const GradientSum& sum, const FlatBuffer& flat, const Config& config);

/// Adds up the gradients of flat buffers over the ranks that contribute to them.
class GradientExchange {
 public:
  GradientExchange() = default;
  virtual ~GradientExchange() = default;
  GradientExchange(const GradientExchange&) = delete;
  GradientExchange& operator=(const GradientExchange&) = delete;

  /// Device memory for the gradients of a whole buffer on their way.
  struct Bytes {
    std::int64_t sent = 0;      ///< of their rounded copy; 0: they are sent from where they lie
    std::int64_t received = 0;  ///< of other ranks' copies
  };
  virtual Bytes bytes(const FlatBuffer& flat, DataType dtype) const = 0;
  /// Issues the rounding of gradients to memory of bytes().sent, and returns what reduce() sends.
  virtual ConstTensorView round(Stream& stream, const FlatBuffer& flat, const ConstTensorView& gradients,
                                void* memory) const = 0;
  /// `out` = the deterministic sum over all ranks, for the part of the buffer that this rank owns. `received`
  /// is memory of bytes().received. flat.reduce_done follows it call by call, so that it covers what was
  /// issued before an error too. Collective over the buffer's group and replicas.
  virtual void reduce(FlatBuffer& flat, const ConstTensorView& sent, void* received, const TensorView& out,
                      const GradientSum& sum, std::vector<Event> ready, const OperationLabel& label) = 0;
  /// The exchange within the buffer's group alone, where `out` is the whole shard.
  virtual GradientExchange& in_group() { return *this; }
};

/// Brings the weights of flat buffers from the ranks that update them to those that read them.
class WeightExchange {
 public:
  WeightExchange() = default;
  virtual ~WeightExchange() = default;
  WeightExchange(const WeightExchange&) = delete;
  WeightExchange& operator=(const WeightExchange&) = delete;

  /// Takes its memory, unless it has it.
  virtual void allocate(MemoryResource& /*memory*/) {}
  /// What training reads is rounded on the way, also on a rank alone.
  virtual bool rounds() const { return false; }
  /// whole = the weights of all ranks of the buffer's group. `own` is this rank's shard, which may lie in its
  /// place in `whole`; or all of `whole`, and nothing is sent. flat.gather_done says when they are there.
  /// Collective over the group.
  virtual void gather(FlatBuffer& flat, const ConstTensorView& own, const TensorView& whole,
                      std::span<const Event> ready, bool training, const OperationLabel& label) = 0;
  /// Fills the parameters that this rank keeps beyond those that it has updated. Collective over the group
  /// and the replicas.
  virtual void gather_updated(FlatBuffer& flat, bool training, const OperationLabel& label) = 0;
};

/// Weights in the compute dtype, over the group.
class PlainWeights : public WeightExchange {
 public:
  /// The configuration outlives it.
  explicit PlainWeights(const Config& config) : config_(config), residency_(config) {}
  void gather(FlatBuffer& flat, const ConstTensorView& own, const TensorView& whole,
              std::span<const Event> ready, bool training, const OperationLabel& label) override;
  void gather_updated(FlatBuffer& flat, bool training, const OperationLabel& label) override;

 protected:
  const Config& config_;
  const Residency residency_;
};

/// Gives each buffer of the layout the exchanges that the configuration wants for it. The configuration, the
/// device and the arena outlive them; `trace` may be null.
StateLayout with_exchanges(StateLayout layout, const Config& config, Device& device, StepArena& arena,
                           TraceRecorder* trace);

}  // namespace tranche::detail
