#pragma once
/// Gradients from what kernels add up to the main gradient: where kernels write them, their reduction over
/// each buffer's group, and their accumulation over micro-batches. Private to engine/.

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
/// group: all ranks of it submit units in the same order.
class GradientReducer {
 public:
  /// All arguments outlive it. Statistics of gradients that leave the device, and of what is reduced apart,
  /// go to `scalars`. `tensor`: the ranks of that axis; null where it is 1. Without `overlap` a reduction is
  /// waited for where it is launched.
  GradientReducer(StateStore& store, StepArena& arena, Stream& compute, Ledger& ledger,
                  const StepScalars& scalars, Communicator* tensor, bool overlap = true);

  const PieceStatistics& pieces() const { return pieces_; }

  /// Ranks whose gradients are added first, in their order, before such sums are added to each other; 0: each
  /// is added to the main gradient in turn.
  int reduction_group() const { return reduction_group_; }
  void set_reduction_group(int ranks) { reduction_group_ = ranks; }
  /// Calls `complete` behind the last reduction of a step of each buffer.
  void on_complete(std::function<void(FlatBuffer&)> complete) { complete_ = std::move(complete); }

  void begin_micro_batch(std::int64_t micro_batch);
  /// The unit whose gradients are held in the micro-batch; empty: none are.
  std::string held(std::int64_t micro_batch) const;
  /// Gradients that the micro-batch still owes, as a sentence; empty: none.
  std::string missing(std::int64_t micro_batch) const;
  /// Also launches the reductions of buffers that stages of a pipeline share: this late, because memory that
  /// such a reduction holds comes back once the other stage has launched its part, for which that may need
  /// what this stage sends in the micro-batch. `last` as for submit().
  void end_micro_batch(std::int64_t micro_batch, bool last = true);
  /// The next gradients are those of a new step.
  void begin_step();
  /// The same where the step has not ended: its open micro-batches and gradients are forgotten.
  void abandon_step();

  /// Throws LogicError while another use of the unit is open, and beyond its uses.
  void check_open(std::int64_t micro_batch, int unit) const;
  /// Gradients of a unit for one use in a micro-batch; checks as check_open().
  void open(std::int64_t micro_batch, int unit);
  /// True once the micro-batch has opened gradients of any unit, which is where its backward pass began.
  bool backward_begun(std::int64_t micro_batch) const;
  /// How often the micro-batch has opened gradients of the unit.
  int begun(std::int64_t micro_batch, int unit) const;
  /// The lowest open micro-batch before this one that still owes gradients of a unit which have to be added
  /// before those of its use number `submitted`; -1: none. Where the gradients of uses are told apart these
  /// are the earlier ones' of as many uses, else all of them.
  std::int64_t first_owing(std::int64_t micro_batch, int unit, int submitted) const;
  /// True when the unit has been submitted as often as it is used.
  bool submitted(std::int64_t micro_batch, int unit) const;
  /// fp32 memory that kernels add a tensor's gradient to; a frozen tensor's is thrown away. Throws
  /// InvalidArgument when the unit has no such index.
  TensorView view(std::int64_t micro_batch, int unit, int index);
  /// The same for a kernel that can write as well as add.
  GradientTarget target(std::int64_t micro_batch, int unit, int index);
  /// One use is complete; the last of the micro-batch launches the reduction behind the compute stream, or
  /// adds to the local accumulator. `last`: no later micro-batch of the step adds to the unit.
  void submit(std::int64_t micro_batch, int unit, bool last);
  /// Lets one use go without submitting it: the micro-batch has failed.
  void drop(std::int64_t micro_batch, int unit) noexcept;

 private:
  /// The memory that kernels add to.
  struct Target {
    StepBuffer slot;              ///< fp32; empty where the main gradient itself is added to
    void* accumulator = nullptr;  ///< the main gradient, where it is added to
    std::vector<char> unwritten;  ///< by tensor: nothing was added and nothing cleared yet
  };
  /// A unit in an open micro-batch.
  struct UnitUses {
    int begun = 0, submitted = 0;
    bool open = false;
    /// The memory for each flat buffer, where kernels do not add to the main gradient directly. The second
    /// list is for the unit's last use, where uses are told apart.
    std::array<std::vector<Target>, 2> targets;
    std::vector<StepBuffer> scratch;  ///< by tensor of the unit: gradients of frozen tensors
    /// The present use is the last of two that are told apart: backward takes it first.
    bool of_last(const FlatBuffer& flat) const { return flat.sums_uses() && begun == 1; }
  };
  using MicroBatch = std::vector<UnitUses>;

  MicroBatch& at(std::int64_t micro_batch) { return open_.at(micro_batch); }
  const MicroBatch& at(std::int64_t micro_batch) const { return open_.at(micro_batch); }
  /// The micro-batch has not submitted all gradients of a unit that is trained.
  bool owes(const MicroBatch& uses, std::size_t unit) const;
  Target& target_of(UnitUses& uses, const FlatBuffer& flat, int buffer);
  /// Elements of the memory that kernels add to.
  static TensorView range_of(const Target& target, std::int64_t position, std::int64_t elements);
  /// Memory of the step, ready on the compute stream.
  StepBuffer acquire(std::int64_t bytes, Category category, std::string_view tag);
  /// The same in fp32 for a whole buffer of gradients.
  StepBuffer acquire_sum(const FlatBuffer& flat, std::string_view tag);
  /// Clears it, but for the large tensors, which the first kernel writes or clear_unwritten() clears.
  void begin_target(Target& target, const FlatBuffer& flat);
  void clear_unwritten(Target& target, const FlatBuffer& flat, int tensor);
  /// Takes memory of the step for a main gradient that has no other.
  void take_transient_gradients(FlatBuffer& flat);
  /// Adds a slot to the accumulator over micro-batches, unless kernels added there themselves.
  void accumulate(Target& target, FlatBuffer& flat, bool of_last_use);
  /// The accumulator over micro-batches.
  TensorView accumulator_of(const FlatBuffer& flat, bool of_last_use) const;
  /// The gradients of both uses, each rounded, in ascending order, in fp32 memory of the step. Lets their
  /// slots go.
  StepBuffer sum_of_uses(const std::array<Target*, 2>& uses, const FlatBuffer& flat);
  /// `last_use`: the target of the last use, where uses are told apart.
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
  // Both have an entry for each trainable buffer; the second list is for the last use, where uses are told
  // apart.
  std::array<std::vector<char>, 2> accumulated_;  ///< the accumulator holds some of this step
  std::array<std::vector<Target>, 2> direct_;     ///< accumulators that kernels add to directly
};

}  // namespace tranche::detail
