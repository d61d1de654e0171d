#pragma once
/// The order of a model's calls: micro-batches of a step, evaluations, inference scopes, and the units and
/// gradients that are held in them. Private to engine/.

#include <cstdint>
#include <source_location>
#include <span>
#include <string>
#include <string_view>

#include "engine/breakdown.h"
#include "engine/data_groups.h"
#include "engine/early_updates.h"
#include "engine/flat_updater.h"
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

/// Throws LogicError.
inline void require(bool condition, const std::string& message,
                    std::source_location where = std::source_location::current()) {
  if (!condition) throw LogicError(message, where);
}

/// Refuses calls that are out of order, with LogicError, before anything has changed.
class StepSequence {
 public:
  /// The parts that it orders; all outlive it.
  struct Parts {
    StateStore& store;
    StepArena& arena;
    StepRecorder& recorder;
    ParameterGatherer& gatherer;
    GradientReducer& reducer;
    const FlatUpdater& updater;
    const StepScalars& scalars;
    const DataGroups& groups;
    EarlyUpdates& early;
  };
  StepSequence(const Runtime& runtime, const Config& config, const ModelSpec& model, const Parts& parts,
               Breakdown& breakdown);

  /// True between steps: no memory of a pass is held, and the whole state may be read and written.
  bool idle() const { return state_ == State::idle; }
  /// True from a step's first micro-batch to its end: gradients are part of the state.
  bool in_step() const { return state_ == State::training; }
  /// A forward pass without gradients, of either kind.
  bool in_evaluation() const { return state_ == State::evaluating || in_inference(); }
  /// Units may be gathered.
  bool in_pass() const { return micro_batches_.any_open() || in_inference(); }
  const MicroBatches& micro_batches() const { return micro_batches_; }
  /// All micro-batches of the step were closed.
  bool complete() const { return in_step() && micro_batches_.closed() == config_.accumulation_steps; }
  /// With debug.compare_calls: a hash of the units gathered and reduced so far.
  std::uint64_t calls() const { return calls_; }

  // --- Micro-batches ---
  /// `beside`: others may be open.
  std::int64_t open(const Shape& shape, std::span<const std::int64_t> samples, bool beside);
  void select(std::int64_t number);
  void close(const ConstTensorView& loss_sum, const ConstTensorView& token_count);
  /// The step has been made.
  void end_step();
  /// Gives up the step that is open, if one is: no memory of it is held, and weights and optimizer state are
  /// as before it. The peers have to do the same.
  void abandon_step() noexcept;

  // --- Forward only ---
  void begin_evaluation();
  /// Collective.
  EvaluationResult end_evaluation();
  void begin_inference(const Shape& shape);
  void end_inference(bool unwinding) noexcept;

  // --- Handles, which have the number of the micro-batch that was the current one when they were made ---
  /// `of_micro_batch` false: the handle belongs to no micro-batch, and is released with number -1.
  void acquire(int unit, bool of_micro_batch = true);
  void release(std::int64_t micro_batch, int unit, bool unwinding) noexcept;
  /// Throws LogicError while an earlier micro-batch owes those gradients of the unit that come next.
  void require_first(int unit) const;
  void open_gradients(int unit);
  /// Throws LogicError for open gradients that may not be submitted before those of an earlier micro-batch.
  void require_turn(std::int64_t micro_batch, int unit) const;
  void submit_gradients(std::int64_t micro_batch, int unit);
  void drop_gradients(std::int64_t micro_batch, int unit, bool unwinding) noexcept;

 private:
  /// The pass or step that the engine is in the middle of. An engine that an error has ended stays in it.
  enum class State : std::uint8_t {
    idle,
    training,
    evaluating,  ///< from begin_evaluation() to end_evaluation(); at most one micro-batch is open
    inferring,   ///< inside an inference scope, which is one pass without micro-batches
  };
  bool in_inference() const { return state_ == State::inferring; }
  /// Throws LogicError when an earlier micro-batch has submitted the unit no more than `submitted` times.
  void require_ascending(std::int64_t micro_batch, int unit, int submitted, std::string_view call) const;
  const std::string& name_of_unit(int unit) const {
    return parts_.store.units()[static_cast<std::size_t>(unit)].name;
  }
  void set_phase(std::string_view phase, std::string_view unit = {}) {
    runtime_.ledger().set_phase(phase, unit);
  }
  std::int64_t open_for_evaluation(const Shape& shape, std::span<const std::int64_t> samples);
  /// Throws unless units and gradients of a micro-batch are let go and handed over.
  void require_let_go(std::int64_t micro_batch);
  /// Adds the numbers of an evaluation's micro-batch up.
  void add_evaluated();
  void note_call(int unit, bool reduces);
  /// The engine is between steps, after a pass that was none of training.
  void end_forward();
  /// Logs, once, that a pass's plan was dropped for those of others.
  void note_dropped_plans();

  const Runtime& runtime_;
  const Config& config_;
  const ModelSpec& model_;
  Parts parts_;
  Breakdown& breakdown_;
  Stream& compute_;
  State state_ = State::idle;
  MicroBatches micro_batches_;
  bool one_sequence_ = false;  ///< of gathers, for all micro-batches of the step: several were open at once
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
