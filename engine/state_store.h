#pragma once
/// The state of a model that a rank keeps, and the one place that says where an element of it lies. Private
/// to engine/.

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/flat_buffer.h"
#include "engine/residency.h"
#include "engine/shard_slice.h"
#include "engine/state_layout.h"
#include "tranche/device/device.h"
#include "tranche/device/memory.h"

namespace tranche::detail {

class OffloadedState;

/// Sees state in tiles (FlatBuffer::in_tiles) before it changes. A save in progress is one.
class StateObserver {
 public:
  virtual ~StateObserver() = default;
  /// Called before the step issues the update of this slice to the slice's stream.
  virtual void before_update(const FlatBuffer& flat, const ShardSlice& slice) = 0;
  /// Called when the step has issued its last update to `stream`.
  virtual void updates_issued(Stream& stream) = 0;
  /// Called before something other than a step replaces state.
  virtual void before_write() = 0;
};

/// The device and memory of a rank; all must outlive the store.
struct StateResources {
  Device& device;
  MemoryResource& device_memory;
  MemoryResource& host_memory;
};

class StateStore {
 public:
  /// `layout` must have its exchanges (with_exchanges()).
  StateStore(const Residency& residency, StateLayout layout, const StateResources& resources);
  ~StateStore();
  StateStore(const StateStore&) = delete;
  StateStore& operator=(const StateStore&) = delete;

  // --- Layout ---
  std::vector<UnitState>& units() { return layout_.units; }
  const std::vector<UnitState>& units() const { return layout_.units; }
  const std::vector<TensorState>& tensors() const { return layout_.tensors; }
  /// The trainable flat buffers of all units, in order.
  const std::vector<FlatBuffer*>& trainable() const { return trainable_; }
  /// The places of all tensors on all ranks.
  const Placement& placement() const { return layout_.placement; }
  const std::vector<StateClass>& state_classes() const { return layout_.state_classes; }
  const Residency& residency() const { return residency_; }
  FlatBuffer& buffer_of(const TensorState& tensor);
  const FlatBuffer& buffer_of(const TensorState& tensor) const;
  const TensorState& tensor_of(const FlatBuffer& flat, const TensorPiece& piece) const {
    return layout_.tensors[static_cast<std::size_t>(flat.tensors[static_cast<std::size_t>(piece.tensor)])];
  }
  /// Index of a tensor; throws InvalidArgument, with the closest match, when there is none of this name.
  int find_tensor(std::string_view name) const;
  /// Position of a tensor in its unit; throws InvalidArgument naming the unit's tensors.
  int index_in_unit(int unit, std::string_view tensor) const;
  /// The tensor at a position of its unit; throws InvalidArgument when there is none.
  const TensorState& tensor_in_unit(int unit, int index) const;
  /// Throws InvalidArgument, naming the stage, for a tensor that another stage of a pipeline holds.
  void require_held(const TensorState& tensor) const;
  /// The engine's number among those of its runtime.
  void set_engine_number(int number) { engine_number_ = number; }
  /// `name` as a unit in labels of collectives: "a", and "a of engine 2" from the second engine of a runtime
  /// on, so that the calls of two engines never match. Lives as long as the store and `name`.
  std::string_view call_name(std::string_view name);

  // --- Memory ---
  /// Takes the part that keeps state off the device. Called before allocate(); without it all state is on the
  /// device.
  void set_offload(std::unique_ptr<OffloadedState> offload);
  OffloadedState* offload() const { return offload_.get(); }
  /// Allocates memory and disk space for a unit's state.
  void allocate(UnitState& unit);
  /// Allocates the main gradient's memory, unless it has been allocated.
  void allocate_gradients(FlatBuffer& flat);
  /// Sets the observer, which must live until another one, or null, is set.
  void observe(StateObserver* observer) { observer_ = observer; }
  StateObserver* observer() const { return observer_; }

  /// Waits until no collective that was issued touches the buffers any more, here or on a peer; the
  /// destructor does so too.
  void await_collectives() noexcept;

  // --- Elements ---
  enum class Access { read, replace, update };
  /// The weights and optimizer state of [range), which must be in device or host memory and within what this
  /// rank keeps.
  ShardSlice slice(FlatBuffer& flat, ElementRange range);
  /// Calls visit for slices of all state that this rank keeps of a buffer, with its main gradient and, on the
  /// device, its weights. The work that visit issues to a slice's stream may change them. Only for a step's
  /// update, before the buffer's own: it does not wait for earlier work on the state, and takes the next
  /// tiles of the pass over the disk (OffloadedState::begin_update). An observer sees state in tiles first.
  void visit_in_step(FlatBuffer& flat, const std::function<void(const ShardSlice&)>& visit);
  /// All state that this rank keeps of a buffer, which must be in device or host memory, with its gradient.
  ShardSlice slice_in_step(FlatBuffer& flat);
  /// Calls visit for slices of the master weights and optimizer state in `range` (within what this rank
  /// keeps), on any tier. The work that it issues is done on return. `replace`: visit writes every element.
  void visit(FlatBuffer& flat, ElementRange range, Access access,
             const std::function<void(const ShardSlice&)>& visit);
  /// Copies between this rank's device or host memory and host memory of the caller; done on return.
  void read(void* to, const void* from, std::int64_t bytes, bool on_host);
  void write(void* to, const void* from, std::int64_t bytes, bool on_host);
  /// The fp32 numbers of a slice whose master weights are in halves, copied to or from host memory of the
  /// caller; done on return.
  void read_halves(const ShardSlice& slice, float* to);
  void write_halves(const ShardSlice& slice, const float* from);
  /// Copies this rank's parameters in [range), on any tier, to or from host memory.
  void read_parameters(FlatBuffer& flat, ElementRange range, void* to);
  void write_parameters(FlatBuffer& flat, ElementRange range, const void* from);
  /// Makes the weights that models read from new master weights. If a rank keeps more parameters than it has
  /// optimizer state for, this starts to gather them, and is collective over the buffer's replicas and group.
  /// `phase` names the gathers in traces.
  void publish(FlatBuffer& flat, const char* phase);
  /// Only the gathers of publish(). If weights are sent as int8 blocks and a rank keeps all of them, it
  /// trains with the values of the blocks, also if it is the only rank.
  void gather_updated(FlatBuffer& flat, const char* phase);
  /// Rounds weights from the master weights again where a rank keeps all of them and int8 blocks have
  /// replaced them. A skipped step, which writes no weights, needs this.
  void restore_weights(FlatBuffer& flat);
  /// Gives weights that a rank keeps whole the values of int8 blocks (training), or of the master weights
  /// (everything else), if they have the other ones. Collective like publish().
  void set_weights_for(bool training);
  /// Called after weights that this rank keeps were written without publish().
  void weights_written() { for_training_.reset(); }

 private:
  void allocate(FlatBuffer& flat);
  /// Waits until no gather reads or writes the weights, so that the host may.
  static void await_gathers(const FlatBuffer& flat);
  /// The same, and waits for weights that are copied between device and host.
  void await_parameters(const FlatBuffer& flat);
  bool simulated() const { return resources_.device.kind() == DeviceKind::meta; }

  StateResources resources_;
  Stream& compute_;
  StateLayout layout_;
  std::vector<FlatBuffer*> trainable_;
  std::unordered_map<std::string, int> tensor_index_;
  Residency residency_;
  StateObserver* observer_ = nullptr;
  std::unique_ptr<OffloadedState> offload_;  ///< null: all state lives on the device
  int engine_number_ = 1;
  std::map<std::string, std::string, std::less<>> call_names_;  ///< of later engines than the first
  std::optional<bool> for_training_ = true;  ///< as given to set_weights_for(); empty: unknown
};

}  // namespace tranche::detail
