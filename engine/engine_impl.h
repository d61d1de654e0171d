#pragma once
/// The state that the parts of the engine share: life (engine.cpp, start.cpp, initial_weights.cpp), gather
/// (parameters.cpp), reduce (gradients.cpp), boundary (step.cpp), reports (report.cpp). Components with a
/// state of their own have a header each. Private to engine/.

#include <atomic>
#include <exception>
#include <functional>
#include <source_location>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/exposed_time.h"
#include "engine/flat_updater.h"
#include "engine/formulas.h"
#include "engine/residency.h"
#include "engine/step_records.h"
#include "engine/step_scalars.h"
#include "engine/step_traffic.h"
#include "engine/stretch.h"
#include "engine/unit_state.h"
#include "offload/host_link.h"
#include "tranche/core/error.h"
#include "tranche/engine/engine.h"

namespace tranche {

struct Engine::Impl {
  Impl(Runtime& runtime_in, ModelSpec model_in, Config config_in, EngineOptions options);
  ~Impl();

  // --- engine.cpp ---
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
  int find_tensor(std::string_view name) const;
  Event all_gather_shard(FlatState& flat, void* buffer, DataType dtype, std::span<const Event> ready,
                         std::string_view unit, const char* phase);
  void begin_pass(const char* program);
  void end_pass();
  void open_micro_batch();
  EvaluationResult finish_evaluation();
  void begin_inference();
  void end_inference(bool unwinding);
  bool simulated() const { return runtime.device().kind() == DeviceKind::meta; }

  // --- batch.cpp ---
  void set_nominal_tokens();
  void set_batch(std::int64_t micro_batch_size, std::int64_t accumulation_steps);

  // --- start.cpp, initial_weights.cpp ---
  void lay_out();
  void allocate_gradients(FlatState& flat, const std::string& name);
  void agree_on_start();
  void allocate();
  /// Collective. Throws OutOfMemory on all ranks when the work of any has run out.
  void allocate_on_all(const std::function<void()>& work);
  void allocate_flat(FlatState& flat, const std::string& name, bool trainable);
  void initialize_weights();
  struct InitialWeights;

  // --- start_notes.cpp ---
  /// One line for each setting that costs overlap or memory in a way its key does not say.
  std::vector<std::string> notes_on_overlap() const;

  // --- offloading.cpp ---
  /// Which units' state lives where; before allocate().
  void choose_tiers();
  void check_host_memory() const;
  struct Offloading;

  // --- state_homes.cpp, state_access.cpp ---
  enum class Access { read, replace, update };
  /// Calls visit for stretches of the master weights and optimizer state in `range` (within what this rank
  /// keeps), wherever they live; what it issues or does has happened when visit_state returns. `replace`:
  /// visit writes all of it.
  Stretch stretch_of(UnitState& unit, ElementRange range);
  void visit_state(UnitState& unit, ElementRange range, Access access,
                   const std::function<void(const Stretch&)>& visit);
  /// Copies between a stretch (or other memory of this rank) and host memory of the caller; done on return.
  void read_from(void* to, const void* from, std::int64_t bytes, bool on_host);
  void write_to(void* to, const void* from, std::int64_t bytes, bool on_host);
  /// This rank's parameters in [range) of a flat buffer whose parameters are not whole, read to or written
  /// from host memory, wherever they live.
  void read_parameters(FlatState& flat, ElementRange range, void* to);
  void write_parameters(FlatState& flat, ElementRange range, const void* from);
  struct StateAccess;

  // --- saving.cpp, snapshot.cpp, loading.cpp ---
  struct Saving;
  struct Loading;
  void require_whole_state(const char* call) const;
  LoadResult load(const std::string& path, const LoadOptions& options);
  void load_arrays(const std::string& path, const std::vector<ArrayTarget>& targets);
  /// From new master weights to weights that models read.
  void publish_weights(UnitState& unit);

  // --- parameters.cpp ---
  struct Gathering;
  /// Fetches ahead what a handle that an exception let go did not.
  void catch_up();
  int index_in_unit(int unit, std::string_view tensor) const;
  ConstTensorView parameter_view(int unit, int index) const;

  // --- gradients.cpp ---
  void open_gradients(int unit);
  void submit_gradients(int unit);
  void drop_gradients(int unit, bool unwinding) noexcept;
  TensorView gradient_view(int unit, int index);
  GradientTarget gradient_target(int unit, int index);
  /// Elements of the memory that kernels add this micro-batch's gradients to.
  TensorView gradient_range(const UnitState& unit, std::int64_t position, std::int64_t elements) const;
  /// Clears it, but for the large tensors, which the first kernel writes or clear_unwritten clears.
  void begin_gradients(UnitState& unit);
  void clear_unwritten(UnitState& unit, int tensor);
  void launch_reduction(UnitState& unit);
  void lend_gradients(UnitState& unit);
  void close_micro_batch(const ConstTensorView& loss_sum, const ConstTensorView& token_count);

  // --- training_rule.cpp ---
  /// Number, rate and momentum of the update that the next step makes if it is applied.
  OptimizerStep next_update() const;
  /// All ranks would update alike, and with numbers.
  void check_rule(const std::vector<BoundaryRecord>& records);
  /// JSON text for a checkpoint, and back.
  std::string rule_to_save() const;
  void take_saved_rule(const std::string& saved_text, std::vector<std::string>& notes);
  /// Collective. Why the program's hook wants the step skipped, as all ranks say; empty: it does not.
  std::string ask_gradient_hook(const StepResult& found, const OptimizerStep& step);

  // --- step.cpp ---
  StepResult finish_step();
  std::vector<BoundaryRecord> agree(std::vector<double>& unit_sums, double& total_squares,
                                    const OptimizerStep& step);
  /// What updates read besides a unit's state: numbers of the step, and sums where the rule has any.
  void prepare_update(const OptimizerStep& step);
  void update_unit(UnitState& unit, const OptimizerStep& step);
  void gather_updated(UnitState& unit, const char* phase = "step");
  /// The device's memory of a unit that keeps all its state there.
  UpdateMemory device_memory(const FlatState& flat, ElementRange range) const;

  Runtime& runtime;
  ModelSpec model;
  Config config;
  std::unique_ptr<Optimizer> optimizer;
  std::optional<std::string> own_schedule;  ///< Schedule::describe() of one that the program brought
  std::unique_ptr<Schedule> schedule;
  std::optional<double> set_rate;  ///< Engine::set_learning_rate()
  GradientHook gradient_hook;
  std::optional<double> hook_scale;  ///< while the hook runs: from G to what the update takes
  ParameterGroups groups;
  LossScaler scaler;
  Communicator& shard;
  Stream& compute;
  MemoryResource& memory;
  int rank = 0;
  int ranks = 1;
  int stage = 0;
  ReductionPolicy policy = ReductionPolicy::boundary;
  Residency residency;
  int reduction_group = 1;
  int loss_exponent = 0;  ///< k: 2^k is the power of two nearest the step's nominal tokens

  std::unique_ptr<StepArena> arena;  ///< before the units: their slots return to it
  std::vector<UnitState> units;
  std::vector<TensorState> tensors;
  std::unordered_map<std::string, int> tensor_index;
  std::vector<OptimizerStateTensor> state_tensors;
  Buffer workspace_buffer;
  StepScalars scalars;
  std::unique_ptr<HostLink> link;           ///< of what is offloaded; null: nothing is
  std::unique_ptr<HostCopies> host_copies;  ///< null: activations stay on the device
  std::unique_ptr<Offloading> offload;      ///< null: all state lives on the device
  std::unique_ptr<FlatUpdater> updater;

  // The state of the step.
  bool in_step = false;
  bool in_micro_batch = false;
  bool in_evaluation = false;
  bool in_inference = false;  ///< an evaluation of one open micro-batch, as the other flags have it
  std::int64_t micro_batch = 0;
  std::int64_t steps_done = 0;
  std::int64_t applied_steps = 0;
  std::int64_t samples_done = 0, tokens_done = 0;
  std::int64_t consecutive_skips = 0;
  std::string failure;                          ///< set when a gradient handle was dropped
  int exceptions = std::uncaught_exceptions();  ///< in flight when the engine was made
  std::exception_ptr broken;                    ///< what every call throws after break_down()
  std::int64_t train_passes = 0, evaluation_passes = 0, inference_passes = 0;
  double evaluation_loss = 0;
  std::int64_t evaluation_tokens = 0;

  std::unique_ptr<Gathering> gathering;
  std::unique_ptr<Saving> saving;
  std::vector<std::string> start_notes;
  std::string half_loaded;  ///< the checkpoint whose load failed in between: the state is no run's
  std::atomic<bool> stop_wanted = false;

  // Reports.
  double step_started = 0, step_ended = 0;
  double between_steps = 0;  ///< from the end of the step before to the beginning of this one
  ExposedTime exposed;
  PassTimes pass_times;  ///< with wall_clock_breakdown
  StateFormulas formulas;
  std::int64_t recorded_gather_elements = 0;  ///< padded, of stage 3 gathers of the last whole step
  StepTraffic traffic;
};

template <typename Call>
auto Engine::Impl::guarded(Call&& call) {
  if (broken) std::rethrow_exception(broken);
  try {
    catch_up();
    return call();
  } catch (...) {
    if (!stays_usable(std::current_exception())) break_down(std::current_exception());
    throw;
  }
}

}  // namespace tranche
