#pragma once
/// The state of a model that a rank keeps, and the one place that says where an element of it lies. Private
/// to engine/.

#include <cstddef>
#include <functional>
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

/// Sees state in tiles (FlatBuffer::in_tiles) before it changes, as a save in progress has to.
class StateObserver {
 public:
  virtual ~StateObserver() = default;
  /// The step updates this slice behind what the slice's stream was given so far.
  virtual void before_update(const FlatBuffer& flat, const ShardSlice& slice) = 0;
  /// The step has issued its last update to `stream`.
  virtual void updates_issued(Stream& stream) = 0;
  /// Something other than a step is about to replace state.
  virtual void before_write() = 0;
};

/// Memory and streams of a rank; all outlive the store.
struct StateResources {
  Device& device;
  MemoryResource& device_memory;
  MemoryResource& host_memory;
};

class StateStore {
 public:
  /// `layout` with its exchanges.
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

  // --- Memory ---
  /// Adopts what moves state off the device, before allocate(); without it all state lives on the device.
  void set_offload(std::unique_ptr<OffloadedState> offload);
  OffloadedState* offload() const { return offload_.get(); }
  /// Takes the memory, and the space on disk, of a unit's state.
  void allocate(UnitState& unit);
  /// The main gradient's memory, unless it has some or takes memory of the step.
  void allocate_gradients(FlatBuffer& flat);
  /// The observer outlives its use; null ends it.
  void observe(StateObserver* observer) { observer_ = observer; }
  StateObserver* observer() const { return observer_; }

  /// Waits until no collective that was issued touches the buffers any more, here or on a peer; the
  /// destructor does so too.
  void await_collectives() noexcept;

  // --- Elements ---
  enum class Access { read, replace, update };
  /// Weights and optimizer state of [range), which lies in device or host memory and in what this rank keeps.
  ShardSlice slice(FlatBuffer& flat, ElementRange range);
  /// Calls visit for slices of all state that this rank keeps of a buffer, with its main gradient and, on the
  /// device, its weights. The work that visit issues to a slice's stream may change them. Only for a step's
  /// update, before the buffer's own: it does not wait for earlier work on the state, and takes the next tiles
  /// of the pass over the disk (OffloadedState::begin_update). An observer sees state in tiles first.
  void visit_in_step(FlatBuffer& flat, const std::function<void(const ShardSlice&)>& visit);
  /// The one slice of a buffer whose state is in device or host memory.
  ShardSlice slice_in_step(FlatBuffer& flat);
  /// Calls visit for slices of the master weights and optimizer state in `range` (within what this rank
  /// keeps), wherever they live; what it issues or does has happened when visit() returns. `replace`: visit
  /// writes all of it.
  void visit(FlatBuffer& flat, ElementRange range, Access access,
             const std::function<void(const ShardSlice&)>& visit);
  /// Copies between this rank's device or host memory and host memory of the caller; done on return.
  void read(void* to, const void* from, std::int64_t bytes, bool on_host);
  void write(void* to, const void* from, std::int64_t bytes, bool on_host);
  /// The fp32 numbers of a slice whose master weights are in halves, copied to or from host memory of the
  /// caller; done on return.
  void read_halves(const ShardSlice& slice, float* to);
  void write_halves(const ShardSlice& slice, const float* from);
  /// This rank's parameters in [range), read to or written from host memory, wherever they live.
  void read_parameters(FlatBuffer& flat, ElementRange range, void* to);
  void write_parameters(FlatBuffer& flat, ElementRange range, const void* from);
  /// Makes the weights that models read from new master weights, and begins to gather them where a rank keeps
  /// more parameters than it has optimizer state of. Collective over the buffer's replicas and group in that
  /// case. `phase` names the gathers in traces.
  void publish(FlatBuffer& flat, const char* phase);
  /// The gathers of publish() alone. Weights that travel as int8 blocks, and of which a rank keeps all, are
  /// read back from them for the sake of training, also on a rank alone.
  void gather_updated(FlatBuffer& flat, const char* phase);
  /// Makes the weights of which a rank keeps all those of the master weights again, where int8 blocks took
  /// their place: a skipped step writes none.
  void restore_weights(FlatBuffer& flat);
  /// Weights that a rank keeps whole are those that int8 blocks say (training), or rounded from the master
  /// weights (everything else). Publishes them anew where they are not; collective like publish().
  void set_weights_for(bool training);
  /// Says that weights which this rank keeps were written past publish().
  void weights_written() { for_training_.reset(); }

 private:
  void allocate(FlatBuffer& flat);
  /// Waits until no gather reads or writes the weights, so that the host may.
  static void await_gathers(const FlatBuffer& flat);
  /// The same, and until weights on their way between device and host are where they live.
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
  std::optional<bool> for_training_ = true;  ///< which weights are kept whole; empty: neither
};

}  // namespace tranche::detail
