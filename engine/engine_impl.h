#pragma once
/// Internal: the engine's parts, split over engine.cpp (life), parameters.cpp (gather), gradients.cpp
/// (reduce), step.cpp (boundary), state_access.cpp (tensors by name, digests), saving.cpp, loading.cpp,
/// report.cpp. Not installed for users.

#include <atomic>
#include <exception>
#include <functional>
#include <map>
#include <source_location>
#include <string>
#include <unordered_map>
#include <vector>

#include "tranche/core/error.h"
#include "tranche/engine/engine.h"
#include "tranche/engine/step_records.h"
#include "tranche/engine/tile_feed.h"
#include "tranche/engine/unit_state.h"
#include "tranche/offload/host_link.h"

namespace tranche {

namespace checkpoint {
class Reader;
class ShardPlan;
struct ReadRequest;
struct Layout;
struct Manifest;
struct SectionRecord;
}  // namespace checkpoint

struct SnapshotLayout;

struct Engine::Impl {
  Impl(Runtime& runtime_in, ModelSpec model_in, Config config_in, std::unique_ptr<Optimizer> optimizer_in);
  ~Impl();

  // --- engine.cpp ---
  void lay_out();
  void agree_on_start();
  void allocate();
  /// Collective. Throws OutOfMemory on all ranks when the work of any has run out.
  void allocate_on_all(const std::function<void()>& work);
  void allocate_flat(FlatState& flat, const std::string& name, bool trainable);
  void initialize_weights();
  void initialize_trainable(UnitState& unit);
  void initialize_frozen(UnitState& unit);
  void draw(const FlatState& flat, const TensorPiece& piece, std::int64_t done, const TensorView& target);
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
  bool whole_parameters() const {
    return (stage < 3 || ranks == 1) && config.offload.parameters == OffloadTier::none;
  }
  bool whole_optimizer() const { return stage == 0 || ranks == 1; }
  /// G has room for the whole buffer: it is the local accumulator, or stage 0 wants all of it.
  bool whole_gradients() const { return ranks == 1 || stage == 0 || policy == ReductionPolicy::boundary; }
  /// Kernels add straight into the persistent accumulator.
  bool direct_accumulation() const {
    return policy == ReductionPolicy::boundary && config.precision.accumulation == DataType::float32;
  }
  /// Address of element `position` of the flat buffer in memory that holds the whole buffer or the shard.
  std::byte* at(const FlatState& flat, void* memory, bool whole, std::int64_t position, DataType dtype) const;
  std::byte* parameters_shard(const FlatState& flat) const;
  std::byte* gradients_shard(const FlatState& flat) const;
  /// fp32 weights of trainable elements that this rank keeps; where they live, but not on nvme.
  TensorView master_view(const FlatState& flat, std::int64_t position, std::int64_t elements) const;
  /// Range of the flat buffer whose optimizer state this rank keeps.
  ElementRange optimizer_range(const FlatState& flat) const;
  int find_tensor(std::string_view name) const;
  Event all_gather_shard(FlatState& flat, void* buffer, DataType dtype, std::span<const Event> ready,
                         std::string_view unit, const char* phase);
  void begin_pass(const char* program);
  void end_pass();
  void open_micro_batch();
  EvaluationResult finish_evaluation();

  /// Has the compute stream wait for a collective's or a copy's event; the time that this costs is added to
  /// `*seconds` by settle_exposed_waits(), once the device has passed both points.
  void wait_for_event(const Event& event, double* seconds);
  void settle_exposed_waits();

  // --- offloading.cpp ---
  bool simulated() const { return runtime.device().kind() == DeviceKind::meta; }
  /// Which units' state lives where; before allocate().
  void choose_tiers();
  void check_host_memory() const;
  void allocate_offloaded(UnitState& unit);
  void prepare_offloading();
  void close_offloading() noexcept;
  /// One micro-batch makes a step, and nobody needs G on the device behind it.
  bool lends_gradients(const FlatState& flat) const {
    return flat.optimizer_tier != OffloadTier::none && config.accumulation_steps == 1;
  }
  void lend_gradients(UnitState& unit);
  void send_gradients_home(UnitState& unit);
  /// Has the disk begin to read what the step will update.
  void read_ahead();
  /// This rank's shard on its way to `place` in device memory, once `ready` have passed.
  Event bring_shard(UnitState& unit, FlatState& flat, void* place, std::vector<Event> ready);
  struct Stretch;
  /// Where new weights of elements are written to, and what sends them where they live.
  struct NewWeights;
  NewWeights begin_weights(FlatState& flat, ElementRange range, Stream& worker);
  Event finish_weights(UnitState& unit, FlatState& flat, NewWeights& weights, Stream& worker);
  /// New weights from a stretch of master weights.
  Event publish_stretch(UnitState& unit, const Stretch& stretch);
  void update_offloaded(const OptimizerStep& step, std::span<const double> optimizer_sums);
  void update_stretch(UnitState& unit, const Stretch& stretch, const OptimizerStep& step,
                      std::span<const double> optimizer_sums);
  void gather_updated(UnitState& unit, const char* phase = "step");
  void begin_offload_report();
  void report_offload(StepResult& result);
  bool offloaded(const UnitState& unit) const {
    return unit.trainable.optimizer_tier != OffloadTier::none ||
           config.offload.parameters != OffloadTier::none;
  }

  // --- state_homes.cpp ---
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

  // --- snapshot.cpp ---
  struct Kept {
    void* data = nullptr;  ///< of element range.begin
    DataType dtype = DataType::float32;
    ElementRange range;  ///< of the unit's flat buffer
  };
  /// A section's part of a stretch (of trainable tensors).
  Kept section_of(const Stretch& stretch, const checkpoint::SectionRecord& section) const;
  ElementRange kept_range(const UnitState& unit, bool frozen) const;
  checkpoint::Layout checkpoint_layout() const;
  SnapshotLayout lay_out_snapshot(const checkpoint::ShardPlan& plan) const;
  void reserve_snapshot(const checkpoint::ShardPlan& plan);
  /// Copies what lives in memory.
  void take_snapshot();
  /// From here on tiles are handed over: by the next step, or by hand_over_tiles().
  void open_tile_feed();
  /// The host stream hands over what is missing of this tile, as it finds it in memory.
  void hand_over_in_stream(int unit, const Stretch& stretch);
  /// The step has issued all of that.
  void finish_handing_over(Stream& stream);
  TileFeed::Tile tile_of(int unit, ElementRange range, const Stretch& stretch) const;
  /// Reads what is missing and hands it over; ends early, with false, once so many seconds have passed.
  bool hand_over_tiles(double seconds);

  // --- saving.cpp ---
  void prepare_saving();
  void describe_run(checkpoint::Manifest& manifest, const SaveOptions& options) const;
  std::string save(const std::string& directory, const SaveOptions& options);
  std::string saving_text() const;
  void start_writing();
  std::string advance_saving();
  bool save_at_rest() const;
  /// At a boundary, once `result` is complete but for what became of a save.
  void look_after_saving(const std::vector<BoundaryRecord>& records, StepResult& result);
  void throw_save_failure();
  void require_whole_state(const char* call) const;
  std::string finish_saving();
  std::string drain_saving();
  void close_saving() noexcept;

  // --- loading.cpp ---
  LoadResult load(const std::string& path, const LoadOptions& options);
  void request_section(const checkpoint::Reader& reader, const FlatState& flat, const std::string& kind,
                       const Kept& kept, std::byte* host,
                       std::vector<checkpoint::ReadRequest>& requests) const;
  void read_sections(checkpoint::Reader& reader, const std::vector<checkpoint::SectionRecord>& sections);
  /// From new master weights to weights that models read.
  void publish_weights(UnitState& unit);

  // --- report.cpp ---
  /// Model state of this rank at another stage plus the slots that a step of it holds at once; an estimate
  /// for telling when a stage does not pay.
  std::int64_t resident_bytes(int of_stage) const;
  StateBytes state_bytes() const;
  /// "1.2 GiB on the device + 3.4 GiB in host memory", empty tiers left out.
  static std::string by_tier(const StateBytes& bytes);
  /// Bytes of a step by the formula, the disk's padding not included; as the model gathers when it says so,
  /// else twice a micro-batch.
  OffloadTraffic formula_offload() const;
  /// Lines of the start-up table about offload: what moves, the disk, bytes of a step.
  std::vector<std::pair<std::string, std::string>> offload_rows() const;
  /// What the stages would take, as a sentence for errors; with offload what this one takes where.
  std::string stages_for_comparison() const;
  /// Padded elements that one micro-batch gathers in stage 3 by what the model declares; -1: not known.
  std::int64_t declared_gathers() const;
  std::int64_t gathered_elements() const;

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
  GradientTarget gradient_target(int unit, int index);
  /// Elements of the memory that kernels add this micro-batch's gradients to.
  TensorView gradient_range(const UnitState& unit, std::int64_t position, std::int64_t elements) const;
  /// Clears it, but for the large tensors, which the first kernel writes or clear_unwritten clears.
  void begin_gradients(UnitState& unit);
  void clear_unwritten(UnitState& unit, int tensor);
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
  /// Memory of a stretch of a unit as an update sees it: each the address of element range.begin.
  struct UpdateMemory {
    ElementRange range;
    std::byte* gradient = nullptr;
    std::byte* master = nullptr;
    std::vector<std::byte*> state;
    std::byte* weight = nullptr;  ///< null: master is the weight
  };
  /// The device's memory of a unit that keeps all its state there.
  UpdateMemory device_memory(const FlatState& flat, ElementRange range) const;
  /// Calls visit(ShardView, tensor index) for every piece of a tensor in the stretch, in order.
  void for_each_piece(const FlatState& flat, const UpdateMemory& memory,
                      const std::function<void(const ShardView&, int)>& visit) const;

  // --- state_access.cpp ---
  /// `read` fills host memory with elements of the flat buffer that lie in `local_range`.
  std::vector<float> gather_tensor(int tensor, DataType dtype, ElementRange local_range,
                                   const std::function<void(ElementRange, void*)>& read);
  std::vector<float> gather_state(int tensor, int state);
  void write_state(int tensor, int state, std::span<const float> values);
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
  Buffer scalars;                           ///< losses [M] fp64, tokens [M] int64, statistics [units]
  Buffer statistics_buffer;                 ///< sums asked for by the optimizer, per tensor
  std::unique_ptr<HostLink> link;           ///< of what is offloaded; null: nothing is
  std::unique_ptr<HostCopies> host_copies;  ///< null: activations stay on the device
  struct Offloading;
  std::unique_ptr<Offloading> offload;    ///< null: all state lives on the device
  std::vector<GroupOptions> group_table;  ///< the distinct ones among the tensors
  Buffer arguments_buffer;                ///< Optimizer::write_arguments() of each of them

  // Where the step is.
  bool in_step = false;
  bool in_micro_batch = false;
  bool in_evaluation = false;
  std::int64_t micro_batch = 0;
  std::int64_t steps_done = 0;
  std::int64_t applied_steps = 0;
  std::int64_t samples_done = 0, tokens_done = 0;
  std::int64_t consecutive_skips = 0;
  std::string failure;        ///< set when a gradient handle was dropped
  std::exception_ptr broken;  ///< what every call throws after break_down()
  std::int64_t train_passes = 0, evaluation_passes = 0;
  double evaluation_loss = 0;
  std::int64_t evaluation_tokens = 0;

  GatherOrder train_order, evaluation_order;
  std::vector<int> observed;  ///< requests of the open micro-batch
  GatherOrder& order() { return in_evaluation ? evaluation_order : train_order; }
  int resident_units = 0;

  struct Saving;
  std::unique_ptr<Saving> saving;
  std::string half_loaded;  ///< the checkpoint whose load failed in between: the state is no run's
  std::atomic<bool> stop_wanted = false;

  // Reports.
  double step_started = 0, step_ended = 0;
  double between_steps = 0;  ///< from the end of the step before to the beginning of this one
  std::vector<ExposedWait> exposed_waits;
  double exposed_gather = 0, exposed_reduce = 0, exposed_offload = 0;
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
