#pragma once
/// How the gradients and the weights of a flat buffer travel between the ranks that hold it. Private to
/// engine/.

#include <cstdint>
#include <span>
#include <vector>

#include "engine/residency.h"
#include "engine/state_layout.h"
#include "tranche/core/trace.h"
#include "tranche/device/device.h"

namespace tranche::detail {

/// One reduction of a flat buffer's gradients, whatever their way.
struct GradientSum {
  std::int64_t micro_batch = 0;  ///< says how many ranks have gradients to give
  int group_size = 1;            ///< the order, as in ReductionOptions
  bool accumulate = false;       ///< adds to what the main gradient holds
  bool last = true;              ///< completes the step's gradients
};

/// Adds up gradients over the ranks that contribute to them: in the communication dtype, over the buffer's
/// group.
class GradientExchange {
 public:
  /// The configuration outlives it.
  explicit GradientExchange(const Config& config) : config_(config), residency_(config) {}
  virtual ~GradientExchange() = default;

  /// Device memory for the gradients of a whole buffer on their way.
  struct Bytes {
    std::int64_t sent = 0;      ///< of their rounded copy; 0: they are sent from where they lie
    std::int64_t received = 0;  ///< of other ranks' copies
  };
  virtual Bytes bytes(const FlatBuffer& flat, DataType dtype) const;
  /// Issues the rounding of gradients to memory of bytes().sent, and returns what reduce() sends.
  virtual ConstTensorView round(Stream& stream, const FlatBuffer& flat, const TensorView& gradients,
                                void* memory) const;
  /// `out` = the deterministic sum over all ranks, for the part of the buffer that this rank owns. `received`
  /// is memory of bytes().received. flat.reduce_done follows it call by call, so that it covers what was
  /// issued before an error too. Collective over the buffer's group and replicas.
  virtual void reduce(FlatBuffer& flat, const ConstTensorView& sent, void* received, const TensorView& out,
                      const GradientSum& sum, std::vector<Event> ready, const OperationLabel& label);
  /// The exchange within the buffer's group alone, where `out` is the whole shard.
  virtual GradientExchange& in_group() { return *this; }

 protected:
  /// For a communicator of the buffer's group.
  ReductionOptions options_of(const GradientSum& sum, const FlatBuffer& flat) const;

  const Config& config_;
  const Residency residency_;
};

/// Brings weights from the ranks that update them to those that read them: in the compute dtype, over the
/// buffer's group.
class WeightExchange {
 public:
  /// The configuration outlives it.
  explicit WeightExchange(const Config& config) : config_(config), residency_(config) {}
  virtual ~WeightExchange() = default;

  /// Takes its memory, unless it has it.
  virtual void allocate(MemoryResource& /*memory*/) {}
  /// True when weights that training reads are rounded on the way, also on a rank alone.
  virtual bool rounds() const { return false; }
  /// whole = the weights of all ranks of the buffer's group. `own` is this rank's shard, which may lie in its
  /// place in `whole`; or all of `whole`, and nothing is sent. flat.gather_done says when they are there.
  /// Collective over the group.
  virtual void gather(FlatBuffer& flat, const ConstTensorView& own, const TensorView& whole,
                      std::span<const Event> ready, bool training, const OperationLabel& label);
  /// Fills the parameters that this rank keeps beyond those that it has updated. Collective over the group
  /// and the replicas.
  virtual void gather_updated(FlatBuffer& flat, bool training, const OperationLabel& label);

 protected:
  const Config& config_;
  const Residency residency_;
};

/// Gives each buffer of the layout the exchanges that the configuration wants for it. The configuration, the
/// device and the arena outlive them; `trace` may be null.
StateLayout with_exchanges(StateLayout layout, const Config& config, Device& device, StepArena& arena,
                           TraceRecorder* trace);

}  // namespace tranche::detail
