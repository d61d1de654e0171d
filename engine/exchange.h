#pragma once
/// Reduces the gradients and gathers the weights of a flat buffer between the ranks that hold it. Private to
/// engine/.

#include <cstdint>
#include <span>
#include <vector>

#include "engine/residency.h"
#include "engine/state_layout.h"
#include "tranche/core/trace.h"
#include "tranche/device/device.h"

namespace tranche::detail {

/// The options of one reduction of a flat buffer's gradients, for any GradientExchange.
struct GradientSum {
  /// Sets the order: the gradients of one data rank are added first, then data ranks in groups of
  /// `reduction_group`, then these groups. With 0, data ranks are added to the main gradient in turn.
  void order(const FlatBuffer& flat, int reduction_group);

  std::int64_t micro_batch = 0;         ///< determines how many ranks contribute gradients
  int group_size = 1, outer_group = 1;  ///< the reduction order, as in ReductionOptions
  bool accumulate = false;              ///< add to the present main gradient
  bool last = true;                     ///< this completes the step's gradients
};

/// Reduces gradients over the ranks that contribute to them. This class does so in the communication dtype,
/// over the buffer's group.
class GradientExchange {
 public:
  /// The configuration must outlive it.
  explicit GradientExchange(const Config& config) : config_(config), residency_(config) {}
  virtual ~GradientExchange() = default;

  /// Device memory for a whole buffer's gradients during a reduction.
  struct Bytes {
    std::int64_t sent = 0;      ///< their rounded copy; 0: they are sent without a copy
    std::int64_t received = 0;  ///< other ranks' copies
  };
  virtual Bytes bytes(const FlatBuffer& flat, DataType dtype) const;
  /// Issues the rounding of gradients into memory of bytes().sent, and returns the view to pass to reduce().
  virtual ConstTensorView round(Stream& stream, const FlatBuffer& flat, const TensorView& gradients,
                                void* memory) const;
  /// `out` = the deterministic sum over all ranks, for the range of the buffer that this rank owns.
  /// `received` is memory of bytes().received. flat.reduce_done is updated after each issued operation, so
  /// that it covers all of them even after an error. Collective over the buffer's group and replicas.
  virtual void reduce(FlatBuffer& flat, const ConstTensorView& sent, void* received, const TensorView& out,
                      const GradientSum& sum, std::vector<Event> ready, const OperationLabel& label);
  /// The exchange restricted to the buffer's group, for which `out` is the whole shard.
  virtual GradientExchange& in_group() { return *this; }

 protected:
  /// The options for a communicator of the buffer's group.
  ReductionOptions options_of(const GradientSum& sum, const FlatBuffer& flat) const;

  const Config& config_;
  const Residency residency_;
};

/// Gathers weights from the ranks that update them to those that read them. This class does so in the compute
/// dtype, over the buffer's group.
class WeightExchange {
 public:
  /// The configuration must outlive it.
  explicit WeightExchange(const Config& config) : config_(config), residency_(config) {}
  virtual ~WeightExchange() = default;

  /// Allocates the memory that it needs, once.
  virtual void allocate(MemoryResource& /*memory*/) {}
  /// True when the weights that training reads are rounded for sending, even with a single rank.
  virtual bool rounds() const { return false; }
  /// whole = the weights of all ranks of the buffer's group. `own` is this rank's shard, possibly at its
  /// place in `whole`; or all of `whole`, and then nothing is sent. flat.gather_done completes when the
  /// weights are in place. Collective over the group.
  virtual void gather(FlatBuffer& flat, const ConstTensorView& own, const TensorView& whole,
                      std::span<const Event> ready, bool training, const OperationLabel& label);
  /// Fills the parameters that this rank keeps but has not updated itself. Collective over the group and the
  /// replicas.
  virtual void gather_updated(FlatBuffer& flat, bool training, const OperationLabel& label);

 protected:
  const Config& config_;
  const Residency residency_;
};

/// Gives each buffer of the layout the exchanges for this configuration. The configuration, the device and
/// the arena must outlive them; `trace` may be null.
StateLayout with_exchanges(StateLayout layout, const Config& config, Device& device, StepArena& arena,
                           TraceRecorder* trace);

}  // namespace tranche::detail
