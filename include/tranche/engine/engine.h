#pragma once
/// The engine: partitions a model's state over ranks and trains it.

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/config/config.h"
#include "tranche/device/ledger.h"
#include "tranche/device/step_arena.h"
#include "tranche/engine/handles.h"
#include "tranche/engine/host_copy.h"
#include "tranche/engine/model_spec.h"
#include "tranche/engine/runtime.h"
#include "tranche/engine/saved_state.h"
#include "tranche/engine/stage_uses.h"
#include "tranche/engine/state_bytes.h"
#include "tranche/engine/step_bytes.h"
#include "tranche/engine/step_result.h"
#include "tranche/engine/training_rule.h"
#include "tranche/kernels/reduction.h"
#include "tranche/kernels/workspace.h"

namespace tranche {

namespace pipeline {
struct PipelineSchedule;
struct RankSchedule;
}  // namespace pipeline

/// Calls of a rank, those of handles included, are made one at a time, each ordered before the next, by
/// whichever thread (docs/internals/design.md, "Threads of a program"); request_stop() at any time. Calls
/// marked collective are made by all ranks in the same order. So are gather(), gradients() and their
/// reduce(), skip_gradients() and the micro-batch calls: any of them may communicate, asynchronously, and a
/// rank that leaves one out or swaps two is found, or waits until the time-out.
///
/// A call out of order (LogicError) or with impossible arguments (InvalidArgument) changes nothing. Any other
/// error in the middle of a step (OutOfMemory, CommunicationError ...) ends the engine, as this rank cannot
/// follow its peers any more: the peers learn of it, and every later call throws the same error.
///
/// A step is M micro-batches and one step():
///     for (m = 0; m < M; ++m) {
///       engine.begin_micro_batch();
///       { auto w = engine.gather(unit); ... forward ... }
///       { auto w = engine.gather(unit); auto g = engine.gradients(unit); ... backward ...
///         std::move(g).reduce(); }
///       engine.end_micro_batch(loss_sum, token_count);
///     }
///     StepResult result = engine.step();
/// The loss gradient is that of the *sum* of token losses times loss_gradient_scale(); the engine divides by
/// the global token count.
class Engine {
 public:
  /// Collective over runtime.all(). Validates, lays out, allocates this rank's part of the state and draws
  /// the initial weights in it. Throws OutOfMemory, and ConfigurationError, also when ranks
  /// disagree on version, configuration, optimizer, schedule, model or numerics. `options` replace the
  /// configured optimizer and schedule.
  Engine(Runtime& runtime, ModelSpec model, Config config, EngineOptions options);
  Engine(Runtime& runtime, ModelSpec model, Config config, std::unique_ptr<Optimizer> optimizer = nullptr);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // --- A micro-batch -----------------------------------------------------------------------------------
  /// Same order on all ranks, as said above; it sends nothing itself. LogicError inside an open micro-batch
  /// or when the step's accumulation_steps are already done.
  ///
  /// `shape` is what the sizes of what the micro-batch acquires follow from, [batch, time] say: no request
  /// grows where no extent does. For batches that change from one micro-batch to the next, and on this rank
  /// alone: their memory is planned for the largest extents seen, and larger ones make room first
  /// (docs/start/own-model.md). Without it all micro-batches are taken to be alike.
  ///
  /// `samples`: global indices of the sequences, in host memory until end_micro_batch(), which key the
  /// dropout of adapters (Config::lora).
  ///
  /// Returns the number of the micro-batch in its step, from 0 on.
  std::int64_t begin_micro_batch(const Shape& shape = {}, std::span<const std::int64_t> samples = {});
  /// The same while others of the step are open, for schedules that interleave micro-batches. A step whose
  /// first micro-batch was begun so gathers units in one order for all of them. The new micro-batch is the
  /// current one: the one that gather(), gradients(), skip_gradients(), end_micro_batch() and
  /// micro_batch_samples() are of. The bits are those of one micro-batch after the other, because a unit
  /// takes gradients in ascending micro-batches alone: gradients() throws LogicError while an earlier one
  /// still owes those of the unit. Not in an evaluation.
  std::int64_t begin_micro_batch_beside(const Shape& shape = {}, std::span<const std::int64_t> samples = {});
  /// Makes an open micro-batch the current one; LogicError for one that is not open. Local to this rank.
  void select_micro_batch(std::int64_t number);
  /// Ends the engine for an error between two of its calls, as one inside a call does: the other ranks are
  /// told, and every later call throws the error again. It logs nothing, unlike fail(). An engine that has
  /// ended stays as it is.
  void break_down(const std::exception_ptr& error) noexcept;
  /// Gathers a unit (stage 3) or views it. Throws LogicError, naming the holders, when more units than the
  /// configured depth would be held at once.
  GatheredUnit gather(UnitId unit);
  /// The same for no micro-batch in particular: while the handle is there, gathers of the unit by
  /// micro-batches find it gathered. For schedules that gather a chunk of units for several micro-batches.
  GatheredUnit hold(UnitId unit);
  /// Gradients of a unit for this micro-batch; LogicError beyond uses_per_micro_batch, or in evaluation.
  UnitGradients gradients(UnitId unit);
  /// The same while earlier micro-batches hold the unit's gradients too, for schedules that put weight
  /// gradients off. The caller adds to each tensor in ascending micro-batches; reduce() out of that order
  /// throws LogicError.
  UnitGradients gradients_ahead(UnitId unit);
  /// Submits zero gradients for all uses of a unit that this micro-batch still owes.
  void skip_gradients(UnitId unit);
  /// loss_sum: one fp64; token_count: one int64; both in device memory, read behind the compute stream.
  /// Throws LogicError naming a unit that is still held; and, which ends the engine on all ranks, one whose
  /// gradients were dropped or not submitted.
  void end_micro_batch(const ConstTensorView& loss_sum, const ConstTensorView& token_count);
  /// Multiply the gradient of the summed loss by this before backward: loss_scale * 2^-k, with 2^k the power
  /// of two nearest the step's nominal tokens. Being a power of two it costs no rounding and keeps 16-bit
  /// gradients in range; step() undoes it and divides by the true token count.
  float loss_gradient_scale() const;

  // --- The end of a step -------------------------------------------------------------------------------
  /// Collective. Agrees on norm and flags, updates, and (stages 1-2) starts gathering new weights. Throws
  /// LogicError, before anything has changed, while memory of the step is held; NumericalError on all ranks
  /// after too many skipped steps in a row, or an overflow at the smallest loss scale. The step has ended
  /// then, and another may begin.
  StepResult step();
  /// The rate of the next step() and all after it, before group factors, in place of the schedule's (whose
  /// momentum stays); nullopt: the schedule's again. Groups with a rate of their own keep it. All ranks must
  /// set the same rate; otherwise step() throws CommunicationError naming rank and rates. Saved; load() takes
  /// over what was set when the checkpoint was saved. InvalidArgument below 0 or not finite.
  void set_learning_rate(std::optional<double> rate);
  /// Sets the function that step() calls before it updates (see GradientHook); an empty one removes it. On
  /// all ranks or none.
  void set_gradient_hook(GradientHook hook);

  /// Collective; between steps. Samples of a rank's micro-batch and micro-batches of a step from here on:
  /// config(), loss_gradient_scale() and samples() follow, the schedule goes on by updates, and the bits are
  /// those of an engine made with this batch. The next pass takes its memory anew and repeats from then on. A
  /// checkpoint has the batch in its configuration, load() leaves the engine's alone. Throws InvalidArgument
  /// on all ranks, nothing having changed, when ranks disagree or a count is below 1; LogicError while memory
  /// of a pass is held; OutOfMemory ends the engine.
  void set_batch(std::int64_t micro_batch_size, std::int64_t accumulation_steps);

  // --- Forward only ------------------------------------------------------------------------------------
  /// Collective. Between these, micro-batches (any number, equal on all ranks) gather but keep no gradients.
  void begin_evaluation();
  EvaluationResult end_evaluation();
  // Without loss and token count: InferenceScope (handles.h).

  // --- Pipelines ---------------------------------------------------------------------------------------
  using Chunk = StageChunk;
  using StageUses = tranche::StageUses;
  /// The part of the model that this rank computes.
  StageUses stage() const;
  /// The actions of all stages in a step, as Config::pipeline_schedule says. LogicError without a pipeline.
  const pipeline::PipelineSchedule& pipeline_schedule() const;
  /// The same as this rank runs it, or (`training` false) one forward pass. Found at the first call and kept;
  /// set_batch() ends that of a step.
  const pipeline::RankSchedule& rank_schedule(bool training) const;
  /// Has the compute stream wait for a message of another stage, in a training step. The time that this costs
  /// is in StepResult::exposed_message_seconds. Throws what made the message fail.
  void wait_for_message(const Event& received);

  // --- Resources for models ----------------------------------------------------------------------------
  Device& device() const;
  Stream& compute_stream() const;
  kernels::Workspace workspace() const;
  /// Memory that repeats every micro-batch (activations); ready to be written on the compute stream, and
  /// reused once that has passed the point where the buffer is released. A caller that uses it on another
  /// stream releases it with an event.
  StepBuffer acquire(std::int64_t bytes, Category category, std::string_view tag);
  /// Config::offload.activations: sends a buffer that backward will want to host memory, behind what the
  /// compute stream was given so far. Until HostCopy::leave_device() kernels may read it on the device, but
  /// not write. Host memory is of the step, too: it repeats, is planned, and counts as activations of
  /// Tier::host. Without that setting nothing is sent, and the copy holds the buffer as it is.
  HostCopy send_to_host(StepBuffer buffer, std::string_view tag);
  /// Starts the copy back to the device, into memory taken now, so that it runs behind other work and
  /// fetch_from_host() finds it done. No-op for a buffer that is on the device or on its way.
  void prefetch_from_host(HostCopy& copy);
  /// The buffer on the device again, with its bytes; the compute stream waits for them. LogicError for an
  /// empty copy.
  StepBuffer fetch_from_host(HostCopy copy);
  Runtime& runtime() const;
  const Config& config() const;
  const ModelSpec& model() const;
  bool evaluating() const;
  /// Number of step() calls so far, and of applied updates.
  std::int64_t steps() const;
  std::int64_t applied_steps() const;
  /// Steps in a row, up to the present one, that were skipped, other than by the gradient hook; a load() goes
  /// on counting where the checkpoint ended.
  std::int64_t skipped_at_end() const;
  /// True when the last loss or gradient that the present weights gave, in a step or an evaluation, was not
  /// finite, so that the update before may have ruined them. An overflow under loss scaling with a finite
  /// loss is none; a step that is taken ends the doubt. A checkpoint records it: of several, load() of a
  /// folder takes the newest that is not in doubt.
  bool in_doubt() const;
  /// Global samples consumed by step() calls so far, those before a load() included.
  std::int64_t samples() const;
  /// Asks for an orderly stop: all ranks find StepResult::stop_requested set in the same step. From any
  /// thread, and from signal handlers. Stays asked for.
  void request_stop() noexcept;
  /// Call in a catch block, before the engine is destroyed, for an error that the peers must learn of:
  /// reports it to them (Runtime::fail), and every later call of the engine throws it. Without it the
  /// engine's destructor waits for pending collectives. Returns the exit status; calling it again, or
  /// Runtime::fail too, is harmless.
  int fail(std::exception_ptr error) noexcept;
  /// Index of the open (or next) micro-batch within the step.
  std::int64_t micro_batch() const;
  /// The samples that begin_micro_batch() was given.
  std::span<const std::int64_t> micro_batch_samples() const;
  bool frozen(std::string_view tensor) const;

  // --- State, by tensor name; collective; fp32; any stage ----------------------------------------------
  /// A full tensor, row-major. A write takes the same values on all ranks. LogicError for a write inside a
  /// step; InvalidArgument for a tensor that is not there and for another number of values. The state of the
  /// optimizer, below, is read and written likewise.
  std::vector<float> read_weight(std::string_view tensor);
  void write_weight(std::string_view tensor, std::span<const float> values);
  /// The reduced mean gradient so far (before step(), between micro-batches; under ReductionPolicy::boundary
  /// this call reduces a copy). In the gradient hook what the update takes. LogicError when the step holds no
  /// gradient.
  std::vector<float> read_gradient(std::string_view tensor);
  /// Replaces the mean gradient of the whole step, rounded to the accumulation dtype: between the last
  /// micro-batch and step(), which takes norm, clipping and overflow from what it finds, or in the gradient
  /// hook. The same values on all ranks. LogicError elsewhere and in a step without tokens; InvalidArgument
  /// for a frozen tensor, another number of values, or, in the hook, values that do not fit the accumulation
  /// dtype.
  void write_gradient(std::string_view tensor, std::span<const float> values);
  std::vector<float> read_optimizer_state(std::string_view tensor, std::string_view state);
  void write_optimizer_state(std::string_view tensor, std::string_view state, std::span<const float> values);
  /// Digest of all fp32 master weights (frozen: compute-dtype values widened), tied once; equal for equal
  /// bits whatever N, stage or tier. Throws CommunicationError when replicas differ, naming the rank.
  kernels::Digest weights_digest();
  /// Weights and optimizer state.
  kernels::Digest state_digest();

  // --- Checkpoints; docs/guides/checkpoints.md ---------------------------------------------------------
  /// Collective; between steps. Saves weights, optimizer state and all that a run needs to go on as a new
  /// checkpoint in `directory`, and returns the path it will have. No byte of state is written by two ranks.
  /// 1. The call blocks while this rank's shard is copied to host memory, which is kept and reused
  ///    (Config::save_buffer takes it at the start).
  /// 2. State on the nvme tier is copied during the next step, as that reads it, or in a pass of its own if
  ///    something needs it before.
  /// 3. A thread writes the file and makes it durable behind the next steps.
  /// 4. The checkpoint is complete when StepResult::saved or finish_saving() names it.
  /// One save is in progress at a time: a second call first waits for the one before. With options.wait all
  /// of it is done on return.
  ///
  /// A save that fails throws CheckpointError on all ranks, naming rank, file and reason: from this call, or,
  /// when it was in progress, from the next of begin_micro_batch() that starts a step, save(), load() and
  /// finish_saving(). Earlier checkpoints and the training state are as before then, and the engine goes on.
  /// The engine's destructor waits for the save in progress and logs its failure.
  std::string save(const std::string& directory, const SaveOptions& options = {});
  /// Collective. Waits for the save in progress; the path of its checkpoint, empty when there was none.
  /// Throws as said above.
  std::string finish_saving();
  /// True while a save is in progress; equal on all ranks.
  bool saving() const;
  /// Collective; between steps. `path` is a checkpoint, or a folder of them, whose newest complete one is
  /// taken. Any number of ranks and any stage may have saved it; each rank reads only what it keeps,
  /// verified. Throws CheckpointError on all ranks; nothing has changed then if the checkpoint does not fit
  /// the model, while damage found in reading leaves weights of which some are new: load another or end.
  LoadResult load(const std::string& path, const LoadOptions& options = {});
  /// Collective; between micro-batches. Reads elements of the program's own arrays (SaveOptions::arrays) from
  /// a checkpoint, LoadResult::folder usually, verified; each rank may ask for others, or for none. An array
  /// of all ranks is given to any number of them; one of each rank to as many as saved it, to each its own.
  /// Throws CheckpointError on all ranks, naming the array: it is not there, has another dtype, too few
  /// elements, was saved by another number of ranks, or is damaged; targets may have been written to then.
  void load_arrays(const std::string& path, const std::vector<ArrayTarget>& targets);

  // --- Reports -----------------------------------------------------------------------------------------
  /// JSON text of the report's `memory`, `traffic` and `model` objects; memory is collective (maximum over
  /// ranks).
  std::string memory_report();
  std::string traffic_report() const;
  using CrossingBytes = tranche::CrossingBytes;
  /// Not collective. Nothing where the communicators do not count them.
  std::optional<CrossingBytes> bytes_to_other_nodes() const;
  std::string model_report() const;
  using StateBytes = tranche::StateBytes;
  /// Bytes of this rank.
  StateBytes state_bytes() const;
  using StepMemory = tranche::StepMemory;
  StepMemory step_memory() const;
  /// Data elements per rank and step by the formula of docs/internals/design.md, from layouts and policy;
  /// stage 3 from the recorded schedule (0 before the first step has ended).
  std::int64_t formula_traffic_elements() const;
  /// The same in bytes: what is reduced in the communication dtype, what is gathered in the compute dtype
  /// (stage 0: the main gradient, in the accumulation dtype), what nodes add up for others in fp32. Of this
  /// rank: between nodes ranks send different numbers of sums.
  std::int64_t formula_traffic_bytes() const;
  /// The start-up table for people. Keys of the configuration without effect have a line each, or, unless
  /// `verbose`, one line together.
  std::string summary(bool verbose = true) const;

 private:
  friend class GatheredUnit;
  friend class InferenceScope;
  friend class UnitGradients;
  friend class StepGuard;
  GatheredUnit gathered(UnitId unit, bool of_micro_batch);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche
