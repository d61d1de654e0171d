#pragma once
/// Internal: the engine's parts, split over engine.cpp (life), parameters.cpp (gather), gradients.cpp
/// (reduce), step.cpp (boundary), state_access.cpp (tensors by name, digests), report.cpp. Not installed for
/// users.

#include <exception>
#include <map>
#include <source_location>
#include <string>
#include <unordered_map>
#include <vector>

#include "tranche/core/error.h"
#include "tranche/engine/engine.h"
#include "tranche/engine/unit_state.h"

namespace tranche {

namespace checkpoint {
class Reader;
struct Layout;
struct SectionRecord;
}  // namespace checkpoint

/// What each rank tells all others at the boundary, after the per-unit sums of squares.
struct BoundaryRecord {
  double loss_sum = 0;
  std::int64_t tokens = 0;
  std::int64_t non_finite_unit = -1;     ///< first unit with an infinity or NaN in this rank's share of G
  std::int64_t non_finite_element = -1;  ///< its position in the unit's flat buffer
  std::uint64_t sequence_hash = 0;
};

struct Engine::Impl {
  Impl(Runtime& runtime_in, ModelSpec model_in, Config config_in, std::unique_ptr<Optimizer> optimizer_in);
  ~Impl();

  // --- engine.cpp ---
  void lay_out();
  void agree_on_start();
  void allocate();
  void allocate_flat(FlatState& flat, const std::string& name, bool trainable);
  void initialize_weights();
  void initialize_flat(UnitState& unit, FlatState& flat, bool trainable);
  void set_phase(std::string_view phase, std::string_view unit = {});
  /// After an error in the middle of a collective sequence this rank cannot follow its peers any more: tells
  /// them, and every later call throws the error again.
  void break_down(std::exception_ptr error) noexcept;
  /// Runs one call of the public face. Misuse (LogicError, InvalidArgument) and NumericalError leave the
  /// engine usable, and so does CheckpointError, which all ranks throw; any other error breaks it down.
  template <typename Call>
  auto guarded(Call&& call);
  void require(bool condition, const std::string& message,
               std::source_location where = std::source_location::current()) const;
  bool whole_parameters() const { return stage < 3 || ranks == 1; }
  bool whole_optimizer() const { return stage == 0 || ranks == 1; }
  /// G has room for the whole buffer: it is the local accumulator, or stage 0 wants all of it.
  bool whole_gradients() const { return ranks == 1 || stage == 0 || policy == ReductionPolicy::boundary; }
  /// Kernels add straight into the persistent accumulator.
  bool direct_accumulation() const {
    return policy == ReductionPolicy::boundary && config.precision.accumulation == DataType::float32;
  }
  /// Address of element `position` of the flat buffer in `buffer`, which holds the whole buffer or the shard.
  std::byte* at(const FlatState& flat, const Buffer& buffer, bool whole, std::int64_t position,
                DataType dtype) const;
  std::byte* parameters_shard(const FlatState& flat) const;
  std::byte* gradients_shard(const FlatState& flat) const;
  /// fp32 weights of trainable elements that this rank keeps.
  TensorView master_view(const FlatState& flat, std::int64_t position, std::int64_t elements) const;
  /// Range of the flat buffer whose optimizer state this rank keeps.
  ElementRange optimizer_range(const FlatState& flat) const;
  int find_tensor(std::string_view name) const;
  Event all_gather_shard(FlatState& flat, void* buffer, DataType dtype, std::span<const Event> ready,
                         std::string_view unit, const char* phase);
  void begin_pass(const char* program);
  void open_micro_batch();
  EvaluationResult finish_evaluation();

  /// Has the compute stream wait for a collective's event; the time that this costs is added to `*seconds` by
  /// settle_exposed_waits(), once the device has passed both points.
  void wait_for_collective(const Event& event, double* seconds);
  void settle_exposed_waits();

  // --- saving.cpp ---
  struct Kept {
    void* data = nullptr;  ///< of element range.begin
    DataType dtype = DataType::float32;
    ElementRange range;  ///< of the unit's flat buffer
  };
  Kept kept_section(UnitState& unit, const checkpoint::SectionRecord& section);
  checkpoint::Layout checkpoint_layout() const;
  std::string save(const std::string& directory, const SaveOptions& options);
  LoadResult load(const std::string& path, const LoadOptions& options);
  void read_flat(checkpoint::Reader& reader, UnitState& unit, bool frozen,
                 const checkpoint::SectionRecord& section);
  /// From new master weights to weights that models read.
  void publish_weights(UnitState& unit);

  // --- report.cpp ---
  /// Model state of this rank at another stage plus the slots that a step of it holds at once; an estimate
  /// for telling when a stage does not pay.
  std::int64_t resident_bytes(int of_stage) const;

  // --- parameters.cpp ---
  void acquire_unit(int unit);
  void release_unit(int unit) noexcept;
  void issue_gather(int unit);
  void prefetch();
  void drop_prefetched();
  void free_gathered(UnitState& unit, bool read) noexcept;
  int index_in_unit(int unit, std::string_view tensor) const;
  ConstTensorView parameter_view(int unit, int index) const;

  // --- gradients.cpp ---
  void open_gradients(int unit);
  void submit_gradients(int unit);
  void drop_gradients(int unit) noexcept;
  TensorView gradient_view(int unit, int index);
  void launch_reduction(UnitState& unit);
  void close_micro_batch(const ConstTensorView& loss_sum, const ConstTensorView& token_count);

  // --- step.cpp ---
  StepResult finish_step();
  std::vector<BoundaryRecord> agree(std::vector<double>& unit_sums, std::vector<double>& optimizer_sums,
                                    double& total_squares);
  /// Sends the optimizer's numbers of this step to the device, one set for each parameter group.
  std::int64_t argument_stride() const {
    return optimizer->statistics_per_tensor() > 0 ? 0 : aligned_bytes(optimizer->argument_bytes());
  }
  void send_arguments(const OptimizerStep& step);
  void update_unit(UnitState& unit, const OptimizerStep& step, std::span<const double> optimizer_sums);
  std::vector<double> collect_optimizer_statistics(const OptimizerStep& step);
  template <typename Visit>
  void for_each_piece(UnitState& unit, ElementRange range, Visit&& visit);

  // --- state_access.cpp ---
  std::vector<float> gather_tensor(int tensor, const void* local, DataType dtype, ElementRange local_range);
  int find_state(std::string_view state) const;
  void require_size(const TensorState& tensor, std::size_t given, const char* call) const;
  kernels::Digest digest(bool with_state);
  std::int64_t global_tokens_so_far();
  std::vector<float> gradient_of(std::string_view name);

  Runtime& runtime;
  ModelSpec model;
  Config config;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<Schedule> schedule;
  ParameterGroups groups;
  LossScaler scaler;
  Communicator& shard;
  Stream& compute;
  MemoryResource& memory;
  int rank = 0;
  int ranks = 1;
  int stage = 0;
  ReductionPolicy policy = ReductionPolicy::boundary;
  int reduction_group = 1;
  int loss_exponent = 0;  ///< k: 2^k is the power of two nearest the step's nominal tokens

  std::unique_ptr<StepArena> arena;  ///< before the units: their slots return to it
  std::vector<UnitState> units;
  std::vector<TensorState> tensors;
  std::unordered_map<std::string, int> tensor_index;
  std::vector<OptimizerStateTensor> state_tensors;
  Buffer workspace_buffer;
  Buffer scalars;                         ///< losses [M] fp64, tokens [M] int64, statistics [units]
  Buffer statistics_buffer;               ///< sums asked for by the optimizer, per tensor
  std::vector<GroupOptions> group_table;  ///< the distinct ones among the tensors
  Buffer arguments_buffer;                ///< Optimizer::write_arguments() of each of them

  // Where the step is.
  bool in_step = false;
  bool in_micro_batch = false;
  bool in_evaluation = false;
  std::int64_t micro_batch = 0;
  std::int64_t steps_done = 0;
  std::int64_t applied_steps = 0;
  std::int64_t consecutive_skips = 0;
  std::string failure;        ///< set when a gradient handle was dropped
  std::exception_ptr broken;  ///< what every call throws after break_down()
  std::int64_t train_passes = 0, evaluation_passes = 0;
  double evaluation_loss = 0;
  std::int64_t evaluation_tokens = 0;

  // The order in which units were asked for in one micro-batch, per program, recorded in the first one.
  struct GatherOrder {
    std::vector<int> units;
    bool known = false;
    std::size_t position = 0;  ///< next expected request
  };
  GatherOrder train_order, evaluation_order;
  std::vector<int> observed;  ///< requests of the open micro-batch
  GatherOrder& order() { return in_evaluation ? evaluation_order : train_order; }
  int resident_units = 0;

  // Reports.
  double step_started = 0;
  struct ExposedWait {
    Event
        arrived;  ///< where the compute stream began to wait; without a time of its own where work is inline
    double issued = 0;
    Event awaited;
    double* seconds = nullptr;
  };
  std::vector<ExposedWait> exposed_waits;
  double exposed_gather = 0, exposed_reduce = 0;
  std::int64_t step_gathered_elements = 0;    ///< padded elements of stage 3 gathers since the step began
  std::int64_t recorded_gather_elements = 0;  ///< of the last whole step
  std::map<std::string, TrafficCount> traffic_before;
  std::map<std::string, TrafficCount> step_traffic;
  std::map<std::string, TrafficCount> step_control_traffic;
  std::map<std::string, TrafficCount> control_before;
};

template <typename Call>
auto Engine::Impl::guarded(Call&& call) {
  if (broken) std::rethrow_exception(broken);
  try {
    return call();
  } catch (const LogicError&) {
    throw;
  } catch (const InvalidArgument&) {
    throw;
  } catch (const NumericalError&) {
    throw;
  } catch (const CheckpointError&) {
    throw;  // all ranks have agreed on it
  } catch (...) {
    break_down(std::current_exception());
    throw;
  }
}

}  // namespace tranche
