#pragma once
/// Carries gradients from kernels to the main gradient: the memory that kernels add to, the reduction over
/// each buffer's group, and the accumulation over micro-batches. Private to engine/.

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/piece_statistics.h"
#include "engine/state_store.h"
#include "engine/step_scalars.h"
#include "tranche/device/ledger.h"
#include "tranche/device/step_arena.h"
#include "tranche/engine/handles.h"

namespace tranche::detail {

/// Micro-batches have numbers, and several may be open at once. Reductions are collective over each buffer's
/// group, so all its ranks must submit units in the same order.
class GradientReducer {
 public:
  /// All arguments must outlive it. `scalars` receives statistics of gradients that leave the device, and of
  /// gradients that are measured separately for the noise. `tensor`: the ranks of that axis; null if it has
  /// size 1. Without `overlap` each reduction is waited for at once.
  GradientReducer(StateStore& store, StepArena& arena, Stream& compute, Ledger& ledger,
                  const StepScalars& scalars, Communicator* tensor, bool overlap = true);

  const PieceStatistics& pieces() const { return pieces_; }

  /// The number of consecutive ranks whose gradients are summed first, before these sums are added to each
  /// other; 0: each rank's gradient is added to the main gradient in turn.
  int reduction_group() const { return reduction_group_; }
  void set_reduction_group(int ranks) { reduction_group_ = ranks; }
  /// Calls `complete` behind the last reduction of a step of each buffer.
  void on_complete(std::function<void(FlatBuffer&)> complete) { complete_ = std::move(complete); }

  void begin_micro_batch(std::int64_t micro_batch);
  /// The unit whose gradients a handle of the micro-batch holds; empty: none.
  std::string held(std::int64_t micro_batch) const;
  /// A sentence that names gradients which the micro-batch still owes; empty: none.
  std::string missing(std::int64_t micro_batch) const;
  /// Also launches the reductions of buffers that pipeline stages share. They are launched only here, because
  /// such a reduction holds memory until the other stage has launched its part, for which that stage may need
  /// messages that this one sends within the micro-batch. `last`: see submit().
  void end_micro_batch(std::int64_t micro_batch, bool last = true);
  /// Starts a new step.
  void begin_step();
  /// The same for a step that was not finished: its open micro-batches and gradients are discarded.
  void abandon_step();

  /// Throws LogicError while another use of the unit is open, and if all its uses have been opened.
  void check_open(std::int64_t micro_batch, int unit) const;
  /// Opens the gradients of a unit for one use in a micro-batch; checks like check_open().
  void open(std::int64_t micro_batch, int unit);
  /// True once the micro-batch has opened gradients of any unit, which marks the beginning of its backward
  /// pass.
  bool backward_begun(std::int64_t micro_batch) const;
  /// How often the micro-batch has opened the unit's gradients.
  int begun(std::int64_t micro_batch, int unit) const;
  /// The lowest open micro-batch before this one that must still submit gradients of the unit before this
  /// micro-batch's use number `submitted`; -1: none. If the gradients of uses are kept separate, an earlier
  /// micro-batch must have submitted more than `submitted` uses, otherwise all of them.
  std::int64_t first_owing(std::int64_t micro_batch, int unit, int submitted) const;
  /// True when all uses of the unit have been submitted.
  bool submitted(std::int64_t micro_batch, int unit) const;
  /// fp32 memory to which kernels add a tensor's gradient; for a frozen tensor it is scratch memory. Throws
  /// InvalidArgument when the unit has no such index.
  TensorView view(std::int64_t micro_batch, int unit, int index);
  /// The same for a kernel that can write as well as add.
  GradientTarget target(std::int64_t micro_batch, int unit, int index);
  /// Ends one use. The last use in the micro-batch launches the reduction after the compute stream's work, or
  /// adds to the local accumulator. `last`: no later micro-batch of the step adds to the unit.
  void submit(std::int64_t micro_batch, int unit, bool last);
  /// Closes one use without submitting it: the micro-batch has failed.
  void drop(std::int64_t micro_batch, int unit) noexcept;

 private:
  /// The memory to which kernels add.
  struct Target {
    StepBuffer slot;              ///< fp32; empty if kernels add to the main gradient directly
    void* accumulator = nullptr;  ///< the main gradient, if kernels add to it directly
    std::vector<char> unwritten;  ///< by tensor: nothing was added to it and it was not cleared yet
  };
  /// A unit in an open micro-batch.
  struct UnitUses {
    int begun = 0, submitted = 0;
    bool open = false;
    /// The memory for each flat buffer, unless kernels add to the main gradient directly. The second list is
    /// for the unit's last use, if uses are kept separate.
    std::array<std::vector<Target>, 2> targets;
    std::vector<StepBuffer> scratch;  ///< by tensor of the unit: gradients of frozen tensors
    /// True if the present use is the last of two separate uses, which backward runs first.
    bool of_last(const FlatBuffer& flat) const { return flat.sums_uses() && begun == 1; }
  };
  using MicroBatch = std::vector<UnitUses>;

  MicroBatch& at(std::int64_t micro_batch) { return open_.at(micro_batch); }
  const MicroBatch& at(std::int64_t micro_batch) const { return open_.at(micro_batch); }
  /// True if the micro-batch has not submitted all gradients of a unit that has trainable tensors.
  bool owes(const MicroBatch& uses, std::size_t unit) const;
  Target& target_of(UnitUses& uses, const FlatBuffer& flat, int buffer);
  /// A range of the memory to which kernels add.
  static TensorView range_of(const Target& target, std::int64_t position, std::int64_t elements);
  /// Step memory that is ready on the compute stream.
  StepBuffer acquire(std::int64_t bytes, Category category, std::string_view tag);
  /// The same in fp32 for a whole buffer of gradients.
  StepBuffer acquire_sum(const FlatBuffer& flat, std::string_view tag);
  /// Clears it, except large tensors, which the first kernel writes, or else clear_unwritten() clears.
  void begin_target(Target& target, const FlatBuffer& flat);
  void clear_unwritten(Target& target, const FlatBuffer& flat, int tensor);
  /// Acquires step memory for a main gradient without persistent memory.
  void take_transient_gradients(FlatBuffer& flat);
  /// Adds a slot to the accumulator over micro-batches, unless kernels have added to it directly.
  void accumulate(Target& target, FlatBuffer& flat, bool of_last_use);
  /// The accumulator over micro-batches.
  TensorView accumulator_of(const FlatBuffer& flat, bool of_last_use) const;
  /// The sum of both uses' gradients, each rounded, in ascending order, in fp32 step memory. Releases their
  /// slots.
  StepBuffer sum_of_uses(const std::array<Target*, 2>& uses, const FlatBuffer& flat);
  /// `last_use`: the target of the last use, if uses are kept separate.
  void reduce(Target& target, Target& last_use, FlatBuffer& flat, std::int64_t micro_batch, bool last);
  StateStore& store_;
  StepArena& arena_;
  Stream& compute_;
  Ledger& ledger_;
  const StepScalars& scalars_;
  PieceStatistics pieces_;
  const bool overlap_;
  int reduction_group_ = 1;
  std::function<void(FlatBuffer&)> complete_;
  std::map<std::int64_t, MicroBatch> open_;
  // Both have an entry for each trainable buffer; the second list is for the last use, if uses are kept
  // separate.
  std::array<std::vector<char>, 2> accumulated_;  ///< the accumulator holds gradients of this step
  std::array<std::vector<Target>, 2> direct_;     ///< accumulators to which kernels add directly
};

}  // namespace tranche::detail
