#pragma once
/// The order of a model's calls: micro-batches of a step, evaluations, inference scopes, and the handles of
/// units and gradients within them. Private to engine/.

#include <cstdint>
#include <source_location>
#include <span>
#include <string>
#include <string_view>

#include "engine/breakdown.h"
#include "engine/data_groups.h"
#include "engine/early_updates.h"
#include "engine/gradient_reducer.h"
#include "engine/micro_batches.h"
#include "engine/parameter_gatherer.h"
#include "engine/state_store.h"
#include "engine/step_record.h"
#include "engine/step_recorder.h"
#include "engine/step_scalars.h"
#include "tranche/device/step_arena.h"
#include "tranche/engine/runtime.h"
#include "tranche/engine/step_result.h"

namespace tranche::detail {

/// Throws LogicError unless the condition holds.
inline void require(bool condition, const std::string& message,
                    std::source_location where = std::source_location::current()) {
  if (!condition) throw LogicError(message, where);
}

/// Refuses calls that are out of order, with LogicError, before anything has changed.
class StepSequence {
 public:
  /// The parts whose work it orders; all must outlive it.
  struct Parts {
    StateStore& store;
    StepArena& arena;
    StepRecorder& recorder;
    ParameterGatherer& gatherer;
    GradientReducer& reducer;
    const StepScalars& scalars;
    const DataGroups& groups;
    StepBoundary& boundary;
  };
  StepSequence(const Runtime& runtime, const Config& config, const ModelSpec& model, const Parts& parts,
               Breakdown& breakdown);

  /// True between steps: no memory of a pass is held, and the whole state may be read and written.
  bool idle() const { return state_ == State::idle; }
  /// True from a step's first micro-batch to its end: gradients are part of the state.
  bool in_step() const { return state_ == State::training; }
  /// True in a forward pass without gradients, in an evaluation or an inference scope.
  bool in_evaluation() const { return state_ == State::evaluating || in_inference(); }
  /// True when units may be gathered.
  bool in_pass() const { return micro_batches_.any_open() || in_inference(); }
  const MicroBatches& micro_batches() const { return micro_batches_; }
  /// Updates of the step that need no agreement of the ranks.
  EarlyUpdates& early() { return early_; }
  const EarlyUpdates& early() const { return early_; }
  /// True when all micro-batches of the step are closed.
  bool complete() const { return in_step() && micro_batches_.closed() == config_.accumulation_steps; }
  /// With debug.compare_calls: a hash of the gathers and reductions so far.
  std::uint64_t calls() const { return calls_; }

  // --- Micro-batches ---
  /// `beside`: other micro-batches may be open.
  std::int64_t open(const Shape& shape, std::span<const std::int64_t> samples, bool beside);
  void select(std::int64_t number);
  void close(const ConstTensorView& loss_sum, const ConstTensorView& token_count);
  /// Called after the step is made.
  void end_step();
  /// Abandons the open step, if there is one: its memory is released, and weights and optimizer state are as
  /// before it. The peers must do the same.
  void abandon_step() noexcept;

  // --- Forward only ---
  void begin_evaluation();
  /// Collective.
  EvaluationResult end_evaluation();
  void begin_inference(const Shape& shape);
  void end_inference(bool unwinding) noexcept;

  // --- Handles. Each has the number of the micro-batch that was current when it was made ---
  /// `of_micro_batch` false: the handle belongs to no micro-batch, and must be released with number -1.
  void acquire(int unit, bool of_micro_batch = true);
  void release(std::int64_t micro_batch, int unit, bool unwinding) noexcept;
  /// Throws LogicError while an earlier micro-batch still owes gradients of the unit that must be added
  /// first.
  void require_first(int unit) const;
  void open_gradients(int unit);
  /// Throws LogicError if open gradients must not be submitted before those of an earlier micro-batch.
  void require_turn(std::int64_t micro_batch, int unit) const;
  void submit_gradients(std::int64_t micro_batch, int unit);
  void drop_gradients(std::int64_t micro_batch, int unit, bool unwinding) noexcept;

 private:
  /// The current pass or step. An engine that an error has ended stays in it.
  enum class State : std::uint8_t {
    idle,
    training,
    evaluating,  ///< from begin_evaluation() to end_evaluation(); at most one micro-batch is open
    inferring,   ///< inside an inference scope, which is one pass without micro-batches
  };
  bool in_inference() const { return state_ == State::inferring; }
  /// Throws LogicError if an earlier micro-batch has submitted the unit `submitted` times or less.
  void require_ascending(std::int64_t micro_batch, int unit, int submitted, std::string_view call) const;
  const std::string& name_of_unit(int unit) const {
    return parts_.store.units()[static_cast<std::size_t>(unit)].name;
  }
  void set_phase(std::string_view phase, std::string_view unit = {}) {
    runtime_.ledger().set_phase(phase, unit);
  }
  std::int64_t open_for_evaluation(const Shape& shape, std::span<const std::int64_t> samples);
  /// Throws unless all units and gradients of the micro-batch were released or submitted.
  void require_let_go(std::int64_t micro_batch);
  /// Adds the loss and tokens of an evaluation's micro-batch.
  void add_evaluated();
  void note_call(int unit, bool reduces);
  /// Returns to the state between steps, after a pass that was not training.
  void end_forward();
  /// Logs, once, that a pass's memory plan was dropped in favour of other plans.
  void note_dropped_plans();

  const Runtime& runtime_;
  const Config& config_;
  const ModelSpec& model_;
  Parts parts_;
  Breakdown& breakdown_;
  Stream& compute_;
  State state_ = State::idle;
  MicroBatches micro_batches_;
  EarlyUpdates early_;
  bool one_sequence_ = false;  ///< gathers of all micro-batches of the step form one sequence, because
                               ///< several were open at once
  std::uint64_t calls_ = 0;
  std::string failure_;  ///< set when gradients were dropped
  struct Evaluated {
    LossTotal loss;
    std::int64_t tokens = 0;
  };
  Evaluated evaluated_;
  bool dropped_plans_noted_ = false;
};

}  // namespace tranche::detail
