#pragma once
/// The engine's façade: the parts, what orders their work in a step, and the run's counters. For engine*.cpp
/// alone.

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/reader.h"
#include "engine/checkpoint_session.h"
#include "engine/flat_updater.h"
#include "engine/formulas.h"
#include "engine/gradient_reducer.h"
#include "engine/micro_batches.h"
#include "engine/parameter_gatherer.h"
#include "engine/stages.h"
#include "engine/state_store.h"
#include "engine/step_boundary.h"
#include "engine/step_recorder.h"
#include "engine/tensor_access.h"
#include "engine/tensor_match.h"
#include "engine/whole_matrices.h"
#include "tranche/core/error.h"
#include "tranche/engine/engine.h"

namespace tranche {

struct Engine::Impl {
  Impl(Runtime& runtime_in, ModelSpec model_in, Config config_in, EngineOptions options);
  static Config checked(Config config, const Runtime& runtime);
  ~Impl();

  // --- engine.cpp: life, micro-batches, forward passes ---
  void set_phase(std::string_view phase, std::string_view unit = {});
  /// After an error in the middle of a collective sequence this rank cannot follow its peers any more: tells
  /// them, and every later call throws the error again.
  void break_down(std::exception_ptr error) noexcept;
  /// The same for an exception that is unwinding, of which nothing is known but where: the peers wait for the
  /// cause a moment (Communicator::post_unwinding). A rank alone has nobody to tell.
  void end_by_unwinding(const std::string& where) noexcept;
  /// True while an exception is ending the engine.
  bool unwinding() const { return std::uncaught_exceptions() > exceptions; }
  /// Runs one call of the public face. Misuse (LogicError, InvalidArgument) and NumericalError leave the
  /// engine usable, and so does CheckpointError, which all ranks throw; any other error breaks it down.
  template <typename Call>
  auto guarded(Call&& call);
  static bool stays_usable(const std::exception_ptr& error);
  void require(bool condition, const std::string& message,
               std::source_location where = std::source_location::current()) const;
  /// The pass or step that the engine is in the middle of. An engine that an error has ended (`broken`) stays
  /// in its state.
  enum class State : std::uint8_t {
    idle,        ///< between steps: no memory of a pass is held, and the whole state may be read and written
    training,    ///< from a step's first micro-batch to step(): gradients are part of the state
    evaluating,  ///< from begin_evaluation() to end_evaluation(); at most one micro-batch is open
    inferring,   ///< inside an inference scope, which is one pass without micro-batches
  };
  bool in_step() const { return state == State::training; }
  bool in_inference() const { return state == State::inferring; }
  /// A forward pass without gradients, of either kind.
  bool in_evaluation() const { return state == State::evaluating || in_inference(); }
  /// Units may be gathered.
  bool in_pass() const { return micro_batches.any_open() || in_inference(); }
  detail::Program program() const {
    return in_inference()    ? detail::Program::infer
           : in_evaluation() ? detail::Program::evaluate
                             : detail::Program::train;
  }
  /// `beside`: others may be open.
  std::int64_t open_micro_batch(const Shape& shape, std::span<const std::int64_t> samples, bool beside);
  void select_micro_batch(std::int64_t number);
  void close_micro_batch(const ConstTensorView& loss_sum, const ConstTensorView& token_count);
  EvaluationResult finish_evaluation();
  /// Gives up the step that is open, if one is: no memory of it is held, and weights and optimizer state are
  /// as before it. Of this rank: its peers have to do the same.
  void abandon_step() noexcept;
  void begin_inference(const Shape& shape);
  void end_inference(bool unwinding);
  /// Logs, once, that a pass's plan was dropped for those of others.
  void note_dropped_plans();
  bool simulated() const { return runtime.device().kind() == DeviceKind::meta; }
  /// "rank 5 (replicate 1, shard 1)", in errors that name a rank.
  std::string name_of_rank(std::size_t of) const { return runtime.mesh().name_of_rank(static_cast<int>(of)); }

  // --- engine_handles.cpp ---
  // Handles have the number of the micro-batch that was the current one when they were made.
  void acquire(int unit);
  void release(std::int64_t micro_batch, int unit, bool unwinding) noexcept;
  void open_gradients(int unit);
  void submit_gradients(std::int64_t micro_batch, int unit);
  void drop_gradients(std::int64_t micro_batch, int unit, bool unwinding) noexcept;

  // --- engine_batch.cpp ---
  void set_nominal_tokens();
  void set_batch(std::int64_t micro_batch_size, std::int64_t accumulation_steps);

  // --- engine_start.cpp ---
  /// Refuses a number of threads that follows that of the ranks, where one result is asked for.
  void check_threads() const;
  /// Matrix products of this run may have other bits on another number of threads.
  bool threads_change_bits() const;
  /// Throws ConfigurationError where the optimizer has nothing to do.
  void describe_routing();
  void check_host_memory() const;
  void agree_on_start();
  void allocate();
  /// Collective. Throws OutOfMemory on all ranks when the work of any has run out.
  void allocate_on_all(const std::function<void()>& work);

  // --- engine_state.cpp ---
  detail::TensorAccess access();
  /// Factor from the main gradient to the mean gradient so far, or to the gradient that the update takes
  /// while the hook runs; collective.
  double gradient_scale();
  int find_trainable(std::string_view name) const;
  void require_size(const detail::TensorState& tensor, std::size_t given, const char* call) const;
  std::vector<float> read_gradient(std::string_view name);
  void write_gradient(std::string_view name, std::span<const float> values);

  // --- engine_checkpoints.cpp ---
  void require_whole_state(const char* call) const;
  void describe_run(checkpoint::Manifest& manifest, const SaveOptions& options) const;
  std::string save(const std::string& directory, const SaveOptions& options);
  std::string finish_saving();
  LoadResult load(const std::string& path, const LoadOptions& options);
  /// Takes the order in which a loaded run added gradients up, as far as it can, and says where it differs.
  void note_order_of_sums(const checkpoint::Manifest& manifest, LoadResult& result);
  /// The tensors that are taken from a checkpoint: of adapters beside a frozen base it may hold both, the
  /// base or the adapters.
  enum class Part : std::uint8_t { whole, base, adapters };
  /// Throws CheckpointError where the model has no use for what it holds.
  Part part_of(const checkpoint::Reader& reader, const LoadOptions& options) const;
  /// Its frozen tensors. Throws CheckpointError where one is missing or of another shape.
  detail::TensorMatch match_base(const checkpoint::Reader& base) const;
  /// Collective. The checkpoint of the base; null where that was drawn.
  std::unique_ptr<checkpoint::Reader> open_base(const checkpoint::Reader& adapters,
                                                const LoadOptions& options,
                                                const checkpoint::Storage& storage);
  /// Draws the frozen weights that adapters without a base of their own were trained beside, unless they are
  /// there. Collective.
  void draw_base(std::uint64_t seed);
  /// Collective. Throws CheckpointError unless the frozen weights are those that adapters were trained
  /// beside. `base`: the checkpoint that they were read from; null: they were drawn.
  void require_base(const checkpoint::Manifest& adapters, const std::string& chosen, checkpoint::Reader* base,
                    std::vector<std::string>& notes);
  /// Collective. 32 hexadecimal digits.
  std::string digest_of_base();
  void load_arrays(const std::string& path, const std::vector<ArrayTarget>& targets);

  // --- engine_rule.cpp ---
  /// Number, rate and momentum of the update that the next step makes if it is applied.
  OptimizerStep next_update() const;
  /// All ranks would update alike, and with numbers.
  void check_rule(const std::vector<detail::StepRecord>& records);
  /// JSON text for a checkpoint, and back.
  std::string rule_to_save() const;
  void take_saved_rule(const std::string& saved_text, std::vector<std::string>& notes);
  /// Collective. Why the program's hook wants the step skipped, as all ranks say; empty: it does not.
  std::string ask_gradient_hook(const StepResult& found, const OptimizerStep& step);

  // --- engine_reports.cpp ---
  /// The communicators of a flat buffer of the mesh, as this rank has them.
  detail::BufferRanks ranks_of(const detail::Placement& placement, int buffer);
  /// The stage of the pipeline that this rank computes; 0 without one.
  int stage() const { return pipeline == nullptr ? 0 : pipeline->rank(); }
  /// Elements and bytes that this rank sends to its group of the axis in a step, by the formula.
  TrafficCount formula_traffic(MeshAxis axis) const;
  /// The same of the buffers that groups of so many ranks share; 0: of all.
  TrafficCount formula_traffic(MeshAxis axis, int group) const;
  /// "2 stages, schedule 1f1b: embedding to h.5 | h.6 to head".
  std::string describe_stages() const;
  /// How often a step reduces a flat buffer's gradients.
  std::int64_t reductions(const detail::FlatBuffer& flat) const {
    return store.residency().policy(flat) == ReductionPolicy::boundary ? 1 : config.accumulation_steps;
  }
  /// How often this rank sends gradients of it.
  std::int64_t sent_reductions(const detail::FlatBuffer& flat) const {
    return store.residency().policy(flat) == ReductionPolicy::boundary
               ? 1
               : config.micro_batches_of(data_rank, data_ranks);
  }
  /// How often the replicas add up their sums of it.
  std::int64_t replica_reductions(const detail::FlatBuffer& flat) const {
    return store.residency().sums_replicas_once(flat) ? 1 : reductions(flat);
  }

  // --- engine_step.cpp ---
  StepResult finish_step();
  /// `unscale`: from the main gradient to the gradient of the summed loss.
  GradientNoise noise_of(const detail::StepBoundary::Agreement& found, double unscale);

  Runtime& runtime;
  ModelSpec model;
  Config config;
  std::unique_ptr<Optimizer> optimizer;
  std::optional<std::string> own_schedule;  ///< Schedule::describe() of one that the program brought
  std::unique_ptr<Schedule> schedule;
  std::optional<double> set_rate;  ///< Engine::set_learning_rate()
  GradientHook gradient_hook;
  bool gradient_written = false;     ///< since the last step: it is not the sum of what was reduced
  GradientNoise noise_averages;      ///< weighted sums over the steps of this run
  std::optional<double> hook_scale;  ///< while the hook runs: from the main gradient to what the update takes
  ParameterGroups groups;
  LossScaler scaler;
  Communicator& world;     ///< every rank
  Communicator& shard;     ///< the ranks that this one shards state with
  Communicator* replicas;  ///< the ranks that hold the same shards; null: only this one
  Communicator* pipeline;  ///< the stages of this data rank; null: no pipeline
  Communicator* tensor;    ///< the ranks of the axis `tensor`; null: it is 1
  /// The ranks that share key and value heads, of which there are fewer than ranks; null: there are none.
  std::unique_ptr<Communicator> sharers;
  int sharers_size = 0;  ///< of the axis `tensor`
  std::vector<Communicator*>
      communicators;           ///< those of the above that differ, and what stages share tensors in
  std::vector<MeshAxis> axes;  ///< of each of them: where the data goes that it carries
  detail::Stages stages;
  Stream& compute;
  MemoryResource& memory;
  int rank = 0;
  int ranks = 1;
  int data_rank = 0, data_ranks = 1;  ///< of the batch: Mesh::data_rank()
  int loss_exponent = 0;              ///< k: 2^k is the power of two nearest the step's nominal tokens

  // The parts, each after those that it uses.
  std::unique_ptr<StepArena> arena;
  detail::StepRecorder recorder;
  detail::StateStore store;
  detail::StateFormulas formulas;
  std::unique_ptr<HostCopies> host_copies;  ///< null: activations stay on the device
  Buffer workspace_buffer;
  detail::StepScalars scalars;
  detail::FlatUpdater updater;
  detail::WholeMatrices matrices;
  detail::ParameterGatherer gatherer;
  detail::GradientReducer reducer;
  detail::StepBoundary boundary;
  std::unique_ptr<detail::CheckpointSession> session;

  State state = State::idle;
  detail::MicroBatches micro_batches;
  bool one_sequence =
      false;  ///< the step's micro-batches are one sequence of gathers: several were open at once
  std::int64_t steps_done = 0;
  std::int64_t applied_steps = 0;
  std::int64_t samples_done = 0, tokens_done = 0;
  std::int64_t consecutive_skips = 0;
  std::uint64_t call_order = 0;  ///< with debug.compare_calls: hash of the units gathered and reduced so far
  void note_call(int unit, bool reduces);
  std::int64_t skipped_at_end = 0;  ///< steps in a row that were skipped, those by the hook not counted
  bool in_doubt = false;            ///< the last loss or gradient of the present weights was not finite
  bool weights_written = false;     ///< by write_weight(), since the last step
  bool proven = false;              ///< the present weights gave a finite loss, and no step was skipped since
  /// Takes down what a step or an evaluation has shown of the weights that it began with.
  void judge_step(const StepResult& result, bool by_hook);
  void judge_evaluation(const EvaluationResult& result);
  std::string failure;                          ///< set when a gradient handle was dropped
  int exceptions = std::uncaught_exceptions();  ///< in flight when the engine was made
  std::exception_ptr broken;                    ///< thrown by every call after break_down()
  detail::LossTotal evaluation_loss;
  std::int64_t evaluation_tokens = 0;
  std::vector<std::string> start_notes;
  std::string routing;      ///< Optimizer::routing()
  std::string base_folder;  ///< the checkpoint that the frozen base of adapters came from; empty: drawn
  std::uint64_t base_seed = config.seed;       ///< that it was drawn from
  std::optional<kernels::Digest> base_digest;  ///< of the frozen weights, while it is known
  std::string half_loaded;  ///< the checkpoint whose load failed in between: the state is no run's
  bool dropped_plans_noted = false;
  std::atomic<bool> stop_wanted = false;
  std::int64_t recorded_gather_elements = 0;     ///< padded, of stage 3 gathers of the last whole step
  std::int64_t recorded_quantized_elements = 0;  ///< of these, as int8 blocks
};

template <typename Call>
auto Engine::Impl::guarded(Call&& call) {
  if (broken) std::rethrow_exception(broken);
  try {
    gatherer.catch_up();
    return call();
  } catch (...) {
    if (!stays_usable(std::current_exception())) break_down(std::current_exception());
    throw;
  }
}

}  // namespace tranche
