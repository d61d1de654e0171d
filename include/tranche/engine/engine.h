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

/// Calls of a rank, including those of handles, are made one at a time, each ordered after the one before, by
/// any thread (docs/internals/contracts.md, "Threads of a program"); only request_stop() may be called at any
/// time. Calls marked collective are made by all ranks in the same order. The same holds for gather(),
/// gradients() and their reduce(), skip_gradients() and the micro-batch calls, because each of them may
/// communicate asynchronously. If a rank leaves one out or swaps two, this is detected, or the ranks wait
/// until the time-out.
///
/// A call out of order (LogicError) or with invalid arguments (InvalidArgument) changes nothing. Any other
/// error in the middle of a step (OutOfMemory, CommunicationError ...) ends the engine, because this rank can
/// no longer follow its peers: the peers are notified, and every later call throws the same error.
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
  /// Collective over runtime.all(). Validates, lays out and allocates this rank's part of the state, and
  /// draws its initial weights. Throws OutOfMemory, and ConfigurationError, also when ranks disagree on
  /// version, configuration, optimizer, schedule, model or numerics. Throws InvalidArgument, even if nothing
  /// will be saved, for names and an Optimizer::describe() that no checkpoint can hold: names of tensors,
  /// aliases and optimizer states are UTF-8 paths of at most 1024 bytes ("h.3/weight"), and none begins with
  /// another one and '/'. `options` replace the configured optimizer and schedule.
  Engine(Runtime& runtime, ModelSpec model, Config config, EngineOptions options);
  Engine(Runtime& runtime, ModelSpec model, Config config, std::unique_ptr<Optimizer> optimizer = nullptr);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // --- A micro-batch -----------------------------------------------------------------------------------
  /// Made in the same order on all ranks (see above), but sends nothing itself. Throws LogicError inside an
  /// open micro-batch, or when the step's accumulation_steps are already done.
  ///
  /// `shape` determines the sizes of the micro-batch's allocations, for example [batch, time]: no allocation
  /// may grow unless an extent does. Give it if batches change from one micro-batch to the next, or differ
  /// between ranks. Their memory is planned for the largest extents seen so far, and a larger batch first
  /// makes room (docs/start/own-model.md). Without it all micro-batches are assumed to have equal sizes.
  /// With tranche.update: as_reduced the first two extents are [batch, time], and ConfigurationError is
  /// thrown if these are fewer tokens than those of a micro-batch's samples.
  ///
  /// `samples`: global indices of the sequences, in host memory that stays valid until end_micro_batch().
  /// They key the dropout of adapters (Config::lora).
  ///
  /// Returns the number of the micro-batch in its step, from 0 on.
  std::int64_t begin_micro_batch(const Shape& shape = {}, std::span<const std::int64_t> samples = {});
  /// The same while other micro-batches of the step are open, for schedules that interleave micro-batches. If
  /// the first micro-batch of a step was begun by this call, the step records one order of gathers for all
  /// its micro-batches. The new micro-batch becomes the current one, on which gather(), gradients(),
  /// skip_gradients(), end_micro_batch() and micro_batch_samples() act. The results have the same bits as
  /// micro-batches one after the other, because a unit accepts gradients only in ascending micro-batches:
  /// gradients() throws LogicError while an earlier one still owes gradients of the unit. Not allowed in an
  /// evaluation.
  std::int64_t begin_micro_batch_beside(const Shape& shape = {}, std::span<const std::int64_t> samples = {});
  /// Makes an open micro-batch the current one; throws LogicError if it is not open. Local to this rank.
  void select_micro_batch(std::int64_t number);
  /// Ends the engine because of an error between two of its calls, in the same way as an error inside a call:
  /// the other ranks are notified, and every later call throws the error again. Unlike fail() it logs
  /// nothing. It has no effect on an engine that has already ended.
  void break_down(const std::exception_ptr& error) noexcept;
  /// Gathers a unit (stage 3), or returns a view of it. Throws LogicError, naming the units that are held,
  /// when more than the configured depth would be held at once.
  GatheredUnit gather(UnitId unit);
  /// The same without a micro-batch: during the handle's lifetime the unit stays gathered for all
  /// micro-batches. For schedules that gather a chunk of units for several micro-batches.
  GatheredUnit hold(UnitId unit);
  /// Returns a unit's gradients for this micro-batch. Throws LogicError beyond uses_per_micro_batch, or in an
  /// evaluation.
  UnitGradients gradients(UnitId unit);
  /// The same while earlier micro-batches still hold the unit's gradients, for schedules that delay weight
  /// gradients. The caller adds to each tensor in ascending micro-batches; reduce() out of that order throws
  /// LogicError.
  UnitGradients gradients_ahead(UnitId unit);
  /// Submits zero gradients for all remaining uses of a unit in this micro-batch.
  void skip_gradients(UnitId unit);
  /// loss_sum: one fp64; token_count: one int64; both in device memory, read in order on the compute stream.
  /// Throws LogicError naming a unit that is still held. It also throws LogicError naming a unit whose
  /// gradients were dropped or not submitted, which ends the engine on all ranks.
  void end_micro_batch(const ConstTensorView& loss_sum, const ConstTensorView& token_count);
  /// The factor by which the gradient of the summed loss must be multiplied before backward: loss_scale *
  /// 2^-k, with 2^k the power of two nearest the step's nominal tokens. A power of two causes no rounding and
  /// keeps 16-bit gradients in range; step() reverses it and divides by the true token count.
  float loss_gradient_scale() const;

  // --- The end of a step -------------------------------------------------------------------------------
  /// Collective. Agrees on norm and flags, updates, and (stages 1-2) starts gathering new weights. Throws
  /// LogicError, before anything has changed, while memory of the step is held. Throws NumericalError on all
  /// ranks after too many skipped steps in a row, or an overflow at the smallest loss scale; the step has
  /// then ended, and another may begin.
  StepResult step();
  /// Sets the learning rate of the next step() and all later ones, before group factors, instead of the
  /// schedule's rate (the schedule's momentum stays); nullopt restores the schedule's. Groups with a rate of
  /// their own keep it. All ranks must set the same rate; otherwise step() throws CommunicationError naming
  /// rank and rates. Checkpoints save it, and load() restores it. Throws InvalidArgument for a rate below 0
  /// or not finite.
  void set_learning_rate(std::optional<double> rate);
  /// Sets the function that step() calls before it updates (see GradientHook); an empty function removes it.
  /// All ranks must set one, or none.
  void set_gradient_hook(GradientHook hook);

  /// Collective; between steps. Sets the samples of a micro-batch and the micro-batches of a step on each
  /// rank from now on. config(), loss_gradient_scale() and samples() change accordingly, the schedule
  /// continues by updates, and the bits are the same as those of an engine made with this batch. The next
  /// pass allocates its memory anew, and later passes repeat it. A checkpoint stores the batch in its
  /// configuration, and load() does not change the engine's. Throws InvalidArgument on all ranks, with
  /// nothing changed, when ranks disagree or a count is below 1; LogicError while memory of a pass is held;
  /// OutOfMemory ends the engine.
  void set_batch(std::int64_t micro_batch_size, std::int64_t accumulation_steps);

  // --- Forward only ------------------------------------------------------------------------------------
  /// Collective. In between, micro-batches (any number, equal on all ranks) gather units but keep no
  /// gradients.
  void begin_evaluation();
  EvaluationResult end_evaluation();
  // Inference without loss and token count uses InferenceScope (handles.h).

  // --- Pipelines ---------------------------------------------------------------------------------------
  using Chunk = StageChunk;
  using StageUses = tranche::StageUses;
  /// The part of the model that this rank computes.
  StageUses stage() const;
  /// The actions of all stages in a step, from Config::pipeline_schedule. Throws LogicError without a
  /// pipeline.
  const pipeline::PipelineSchedule& pipeline_schedule() const;
  /// This rank's actions in a step, or (`training` false) in one forward pass. They are computed at the first
  /// call and kept; set_batch() discards those of a step.
  const pipeline::RankSchedule& rank_schedule(bool training) const;
  /// Makes the compute stream wait for a message of another stage, in a training step.
  /// StepResult::exposed_message_seconds includes the waiting time. Throws the message's error if it failed.
  void wait_for_message(const Event& received);

  // --- Resources for models ----------------------------------------------------------------------------
  Device& device() const;
  Stream& compute_stream() const;
  kernels::Workspace workspace() const;
  /// Memory that repeats in every micro-batch (activations). It may be written on the compute stream, and is
  /// reused once that stream has passed the point where the buffer is released. If it is used on another
  /// stream, it must be released with an event.
  StepBuffer acquire(std::int64_t bytes, Category category, std::string_view tag);
  /// Config::offload.activations: copies a buffer that backward needs to host memory, after the work already
  /// on the compute stream. Until HostCopy::leave_device() kernels may read it on the device, but not write
  /// it. The host memory also belongs to the step: it repeats, is planned, and counts as activations of
  /// Tier::host. Without that setting nothing is copied, and the HostCopy just holds the buffer.
  HostCopy send_to_host(StepBuffer buffer, std::string_view tag);
  /// Allocates device memory and starts the copy back to it, concurrently with other work, so that
  /// fetch_from_host() need not wait. No-op for a buffer that is on the device or already being copied there.
  void prefetch_from_host(HostCopy& copy);
  /// Returns the buffer on the device with its bytes; the compute stream waits for them. Throws LogicError
  /// for an empty copy.
  StepBuffer fetch_from_host(HostCopy copy);
  Runtime& runtime() const;
  const Config& config() const;
  const ModelSpec& model() const;
  bool evaluating() const;
  /// Number of step() calls so far, and of applied updates.
  std::int64_t steps() const;
  std::int64_t applied_steps() const;
  /// The number of consecutive skipped steps up to the present one, without those that the gradient hook
  /// skipped; load() restores the checkpoint's count.
  std::int64_t skipped_at_end() const;
  /// True when the latest loss or gradient with the present weights, in a step or an evaluation, was not
  /// finite, so that the update before may have ruined the weights. An overflow under loss scaling with a
  /// finite loss does not count; an applied step resets it. Checkpoints record it: load() of a folder takes
  /// the newest checkpoint that is not in doubt.
  bool in_doubt() const;
  /// Global samples consumed by all step() calls so far, including those before a load().
  std::int64_t samples() const;
  /// Requests an orderly stop: all ranks find StepResult::stop_requested set in the same step. May be called
  /// from any thread and from signal handlers. The request cannot be withdrawn.
  void request_stop() noexcept;
  /// Call this in a catch block, before the engine is destroyed, to report an error to the peers
  /// (Runtime::fail); every later call of the engine throws the error. Without it the engine's destructor
  /// waits for pending collectives. Returns the exit status. Calling it again, or Runtime::fail too, is
  /// harmless.
  int fail(std::exception_ptr error) noexcept;
  /// Index of the current micro-batch within the step, or of the next one if none is open.
  std::int64_t micro_batch() const;
  /// The samples that were passed to begin_micro_batch().
  std::span<const std::int64_t> micro_batch_samples() const;
  bool frozen(std::string_view tensor) const;

  // --- State, by tensor name; collective; fp32; any stage ----------------------------------------------
  /// Reads or writes a full tensor, row-major. A write takes the same values on all ranks. Throws LogicError
  /// for a write inside a step; InvalidArgument for an unknown tensor and for another number of values. The
  /// same holds for the optimizer's state, below.
  std::vector<float> read_weight(std::string_view tensor);
  void write_weight(std::string_view tensor, std::span<const float> values);
  /// The reduced mean gradient so far (before step(), between micro-batches; under ReductionPolicy::boundary
  /// this call reduces a copy). In the gradient hook it is the gradient that the update uses. Throws
  /// LogicError when the step holds no gradient.
  std::vector<float> read_gradient(std::string_view tensor);
  /// Replaces the mean gradient of the whole step, rounded to the accumulation dtype. Call it between the
  /// last micro-batch and step(), which computes norm, clipping and overflow from the new values, or in the
  /// gradient hook. All ranks pass the same values. Throws LogicError elsewhere and in a step without tokens;
  /// InvalidArgument for a frozen tensor, another number of values, or, in the hook, values out of the
  /// accumulation dtype's range.
  void write_gradient(std::string_view tensor, std::span<const float> values);
  std::vector<float> read_optimizer_state(std::string_view tensor, std::string_view state);
  void write_optimizer_state(std::string_view tensor, std::string_view state, std::span<const float> values);
  /// Digest of all fp32 master weights (of frozen tensors: compute-dtype values widened), with tied tensors
  /// counted once. It is equal for equal bits, for any number of ranks, stage and tier. Throws
  /// CommunicationError when replicas differ, naming the rank.
  kernels::Digest weights_digest();
  /// The same digest over weights and optimizer state.
  kernels::Digest state_digest();

  // --- Checkpoints; docs/guides/checkpoints.md ---------------------------------------------------------
  /// Collective; between steps. Saves weights, optimizer state and everything else that a resumed run needs
  /// as a new checkpoint in `directory`, and returns the path it will have. No byte of state is written by
  /// two ranks.
  /// 1. The call blocks while this rank's shard is copied to host memory, which is kept and reused
  ///    (Config::save_buffer allocates it at the start).
  /// 2. State on the nvme tier is copied while the next step reads it, or in a separate pass if it is needed
  ///    earlier.
  /// 3. A thread writes the file and makes it durable during the next steps.
  /// 4. The checkpoint is complete when StepResult::saved or finish_saving() names it.
  /// One save is in progress at a time: a second call first waits for the one before. With options.wait all
  /// steps are done on return.
  ///
  /// A save that fails throws CheckpointError on all ranks, naming rank, file and reason: from this call, or,
  /// if it was in progress, from the next call of save(), load(), finish_saving(), or begin_micro_batch()
  /// that starts a step. Earlier checkpoints and the training state are then unchanged, and the engine
  /// remains usable. The engine's destructor waits for the save in progress and logs its failure.
  std::string save(const std::string& directory, const SaveOptions& options = {});
  /// Collective. Waits for the save in progress and returns the path of its checkpoint, empty when there was
  /// none. Throws like save().
  std::string finish_saving();
  /// True while a save is in progress; equal on all ranks.
  bool saving() const;
  /// Collective; between steps. `path` is a checkpoint, or a folder of them, of which the newest complete one
  /// is loaded. It may have been saved by any number of ranks at any stage; each rank reads and verifies only
  /// the state that it keeps. Throws CheckpointError on all ranks. If the checkpoint does not fit the model,
  /// nothing has changed; if damage is found during reading, some weights are already replaced: load another
  /// checkpoint or end.
  LoadResult load(const std::string& path, const LoadOptions& options = {});
  /// Collective; between micro-batches. Reads elements of the program's own arrays (SaveOptions::arrays) from
  /// a checkpoint, usually LoadResult::folder, and verifies them; each rank may read others, or none. An
  /// array of all ranks can be read by any number of ranks; one of each rank by as many ranks as saved it,
  /// each its own. Throws CheckpointError on all ranks, naming the array, if it does not exist, has another
  /// dtype, too few elements, was saved by another number of ranks, or is damaged; targets may then have been
  /// written.
  void load_arrays(const std::string& path, const std::vector<ArrayTarget>& targets);

  // --- Reports -----------------------------------------------------------------------------------------
  /// JSON text of the report's `memory`, `traffic` and `model` objects; memory is collective (maximum over
  /// ranks).
  std::string memory_report();
  std::string traffic_report() const;
  using CrossingBytes = tranche::CrossingBytes;
  /// Not collective. nullopt if the communicators do not count them.
  std::optional<CrossingBytes> bytes_to_other_nodes() const;
  std::string model_report() const;
  using StateBytes = tranche::StateBytes;
  /// Bytes of this rank.
  StateBytes state_bytes() const;
  using StepMemory = tranche::StepMemory;
  StepMemory step_memory() const;
  /// Data elements per rank and step by the formula of docs/internals/arithmetic.md, from layouts and policy;
  /// for stage 3 from the recorded schedule (0 before the first step has ended). Messages of chains over the
  /// axis `tensor` (Config::tensor_sums) have no formula and are not in it.
  std::int64_t formula_traffic_elements() const;
  /// The same in bytes of this rank: reductions in the communication dtype, gathers in the compute dtype
  /// (stage 0: the main gradient, in the accumulation dtype), and sums of nodes for other nodes in fp32.
  /// Ranks differ, because between nodes they send different numbers of sums.
  std::int64_t formula_traffic_bytes() const;
  /// The start-up table for people. Configuration keys without effect have a line each, or, unless `verbose`,
  /// one line together.
  std::string summary(bool verbose = true) const;

 private:
  friend class GatheredUnit;
  friend class InferenceScope;
  friend class UnitGradients;
  friend class StepGuard;
  GatheredUnit gathered(UnitId unit, bool of_micro_batch);
  struct Impl;
  std::unique_ptr<Impl> impl_;
  std::shared_ptr<Engine*>
      self_;  ///< shared with the handles, for which it becomes null when the engine ends
};

}  // namespace tranche
