#pragma once
/// The engine's implementation: its parts, the order of their work in a step, and the run's counters. Only
/// for engine*.cpp.

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
#include "engine/parameter_gatherer.h"
#include "engine/run_progress.h"
#include "engine/run_record.h"
#include "engine/stages.h"
#include "engine/state_store.h"
#include "engine/step_boundary.h"
#include "engine/step_recorder.h"
#include "engine/step_rule.h"
#include "engine/step_sequence.h"
#include "engine/tensor_access.h"
#include "engine/traffic_formulas.h"
#include "engine/whole_matrices.h"
#include "pipeline/schedule/run_order.h"
#include "tranche/core/error.h"
#include "tranche/engine/engine.h"

namespace tranche {

struct Engine::Impl {
  Impl(Runtime runtime_in, ModelSpec model_in, Config config_in, EngineOptions options);
  static Config checked(Config config, const Runtime& runtime);
  ~Impl();

  // --- engine.cpp: construction, micro-batches, forward passes ---
  void set_phase(std::string_view phase, std::string_view unit = {});
  /// Runs one public call. An error after which the engine is unusable ends it.
  template <typename Call>
  auto guarded(Call&& call);
  /// Throws ConfigurationError if units are updated before the ranks agree and [batch, time] has fewer tokens
  /// than the update divides by.
  void require_full_lengths(const Shape& shape) const;
  /// `beside`: other micro-batches may be open.
  std::int64_t open_micro_batch(const Shape& shape, std::span<const std::int64_t> samples, bool beside);
  bool simulated() const { return runtime.device().kind() == DeviceKind::meta; }

  /// Allocates the memory of state and steps.
  void allocate();
  /// Collective. Throws OutOfMemory on all ranks if `work` ran out of memory on any.
  void on_all(const std::function<void()>& work);

  // --- engine_batch.cpp ---
  /// The exponent k: 2^k is the power of two nearest the step's nominal tokens.
  int loss_exponent() const;
  /// Allocates the memory of a step's scalars.
  void allocate_scalars();
  void set_batch(std::int64_t micro_batch_size, std::int64_t accumulation_steps);

  // --- engine_state.cpp ---
  detail::TensorAccess access();
  /// The factor from the main gradient to the mean gradient so far, or, while the hook runs, to the gradient
  /// that the update uses; collective.
  double gradient_scale();
  int find_trainable(std::string_view name) const;
  /// Throws LogicError while a step's updates are in progress: state is neither that of before nor after it.
  void require_not_updating(std::string_view call) const;
  void require_size(const detail::TensorState& tensor, std::size_t given, const char* call) const;
  std::vector<float> read_gradient(std::string_view name);
  void write_gradient(std::string_view name, std::span<const float> values);

  // --- engine_checkpoints.cpp ---
  std::string save(const std::string& directory, const SaveOptions& options);
  std::string finish_saving();
  LoadResult load(const std::string& path, const LoadOptions& options);

  // --- engine_step.cpp ---
  StepResult finish_step();
  /// Throws unless the step may end now, and makes the compute stream wait for the step's gradients.
  void end_passes();
  /// The factor from the main gradient, which is loss_scale * 2^-k times that of the summed loss, to the mean
  /// over `tokens` tokens; 0 for no tokens.
  double unscale(std::int64_t tokens) const;
  /// Decides from the agreed loss and gradients whether the step is applied, and whether gradients are
  /// clipped.
  void judge_gradients(const detail::StepBoundary::Agreement& found, StepResult& result);
  /// Ends the engine on all ranks if units were already updated for a step that turns out to be skipped or to
  /// have another number of tokens.
  void require_foreseen(const StepResult& result);
  /// Returns the engine to the state between steps.
  void close_step(StepResult& result);

  Runtime runtime;  ///< a handle of the program's, which may be moved
  ModelSpec model;
  Config config;
  std::unique_ptr<Optimizer> optimizer;
  LossScaler scaler;
  Communicator& world;  ///< every rank
  detail::Stages stages;
  Stream& compute;

  // The parts, each after those that it uses.
  detail::Breakdown breakdown;
  detail::StepRule rule;
  std::unique_ptr<StepArena> arena;
  detail::StepRecorder recorder;
  detail::DataGroups data_groups;
  detail::StateStore store;
  detail::StateFormulas formulas;
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
  detail::StepSequence sequence;

  bool gradient_written = false;  ///< since the last step; it then differs from the sum of reduced gradients
  std::vector<std::string> start_notes;
  /// Results of Engine::rank_schedule() for a step and for a forward pass; null until first requested.
  std::unique_ptr<const pipeline::RankSchedule> step_schedule, forward_schedule;
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
