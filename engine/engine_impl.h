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

#include "engine/breakdown.h"
#include "engine/checkpoint_loader.h"
#include "engine/checkpoint_session.h"
#include "engine/data_groups.h"
#include "engine/flat_updater.h"
#include "engine/formulas.h"
#include "engine/frozen_base.h"
#include "engine/gradient_reducer.h"
#include "engine/micro_batches.h"
#include "engine/parameter_gatherer.h"
#include "engine/run_progress.h"
#include "engine/run_record.h"
#include "engine/stages.h"
#include "engine/state_store.h"
#include "engine/step_boundary.h"
#include "engine/step_recorder.h"
#include "engine/step_rule.h"
#include "engine/tensor_access.h"
#include "engine/traffic_formulas.h"
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
  /// Runs one call of the public face. An error after which the engine cannot go on ends it.
  template <typename Call>
  auto guarded(Call&& call);
  void require(bool condition, const std::string& message,
               std::source_location where = std::source_location::current()) const;
  /// The pass or step that the engine is in the middle of. An engine that an error has ended (Breakdown)
  /// stays in its state.
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

  /// Takes the memory of state and steps.
  void allocate();
  /// Collective. Throws OutOfMemory on all ranks when the work of any has run out.
  void on_all(const std::function<void()>& work);

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
  std::string save(const std::string& directory, const SaveOptions& options);
  std::string finish_saving();
  LoadResult load(const std::string& path, const LoadOptions& options);

  /// The communicators of a flat buffer of the mesh, as this rank has them.
  detail::BufferRanks ranks_of(const detail::Placement& placement, int buffer) const;

  // --- engine_step.cpp ---
  StepResult finish_step();
  /// Refuses what is no end of a step, and has the compute stream wait for the step's gradients.
  void end_passes();
  /// From the main gradient, which is loss_scale * 2^-k times that of the summed loss, to the mean over so
  /// many tokens; 0 without any.
  double unscale(std::int64_t tokens) const;
  /// What the agreement says of loss and gradients: whether the step is applied, and clipped.
  void judge_gradients(const detail::StepBoundary::Agreement& found, StepResult& result);
  /// The engine is between steps again.
  void close_step(StepResult& result);

  Runtime& runtime;
  ModelSpec model;
  Config config;
  std::unique_ptr<Optimizer> optimizer;
  bool gradient_written = false;  ///< since the last step: it is not the sum of what was reduced
  ParameterGroups groups;
  LossScaler scaler;
  Communicator& world;     ///< every rank
  Communicator& shard;     ///< the ranks that this one shards state with
  Communicator* replicas;  ///< the ranks that hold the same shards; null: only this one
  Communicator* pipeline;  ///< the stages of this data rank; null: no pipeline
  detail::Stages stages;
  Stream& compute;
  MemoryResource& memory;
  int rank = 0;
  int ranks = 1;
  int data_rank = 0, data_ranks = 1;  ///< of the batch: Mesh::data_rank()
  int loss_exponent = 0;              ///< k: 2^k is the power of two nearest the step's nominal tokens

  // The parts, each after those that it uses.
  detail::Breakdown breakdown;
  detail::StepRule rule;
  std::unique_ptr<StepArena> arena;
  detail::StepRecorder recorder;
  detail::StateStore store;
  detail::StateFormulas formulas;
  detail::DataGroups data_groups;
  std::unique_ptr<HostCopies> host_copies;  ///< null: activations stay on the device
  Buffer workspace_buffer;
  detail::StepScalars scalars;
  detail::FlatUpdater updater;
  detail::WholeMatrices matrices;
  detail::ParameterGatherer gatherer;
  detail::GradientReducer reducer;
  detail::TrafficFormulas traffic;
  detail::StepBoundary boundary;
  detail::CheckpointSession session;
  detail::RunProgress progress;
  detail::FrozenBase base;
  detail::RunRecord run_record;
  detail::CheckpointLoader loader;

  State state = State::idle;
  detail::MicroBatches micro_batches;
  bool one_sequence =
      false;  ///< the step's micro-batches are one sequence of gathers: several were open at once
  std::uint64_t call_order = 0;  ///< with debug.compare_calls: hash of the units gathered and reduced so far
  void note_call(int unit, bool reduces);
  std::string failure;  ///< set when a gradient handle was dropped
  detail::LossTotal evaluation_loss;
  std::int64_t evaluation_tokens = 0;
  std::vector<std::string> start_notes;
  std::string routing;  ///< Optimizer::routing()
  bool dropped_plans_noted = false;
  std::atomic<bool> stop_wanted = false;
};

template <typename Call>
auto Engine::Impl::guarded(Call&& call) {
  breakdown.throw_if_ended();
  try {
    gatherer.catch_up();
    return call();
  } catch (...) {
    if (!detail::Breakdown::stays_usable(std::current_exception())) breakdown.end(std::current_exception());
    throw;
  }
}

}  // namespace tranche
