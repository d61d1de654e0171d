#include "engine/state_store.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/closest_match.h"
#include "core/split_float.h"
#include "engine/exchange.h"
#include "engine/offloaded_state.h"
#include "tranche/core/error.h"

namespace tranche::detail {

namespace {
/// Calls part(first, count, high, low) for one run of elements after the other; `high` and `low` are host
/// memory for the halves of a run.
template <class Part>
void for_halves(std::int64_t elements, const Part& part) {
  constexpr std::int64_t at_once = 1 << 18;
  std::vector<bfloat16> high(static_cast<std::size_t>(std::min(elements, at_once)));
  std::vector<std::uint16_t> low(high.size());
  for (std::int64_t first = 0; first < elements; first += at_once) {
    part(first, std::min(at_once, elements - first), high.data(), low.data());
  }
}
}  // namespace

StateStore::StateStore(const Residency& residency, StateLayout layout, const StateResources& resources)
    : resources_(resources),
      compute_(resources.device.compute_stream()),
      layout_(std::move(layout)),
      residency_(residency) {
  for (UnitState& unit : layout_.units) {
    for (FlatBuffer& flat : unit.buffers) {
      if (!flat.trainable) continue;
      flat.trainable_index = static_cast<int>(trainable_.size());
      trainable_.push_back(&flat);
    }
  }
  residency_.assign_tiers(layout_.units);
  for (std::size_t i = 0; i < layout_.tensors.size(); ++i) {
    tensor_index_.emplace(layout_.tensors[i].name, static_cast<int>(i));
  }
}

StateStore::~StateStore() {
  await_collectives();
  // Exchanges wait for their streams, which work on buffers.
  for (UnitState& unit : layout_.units) {
    for (FlatBuffer& flat : unit.buffers) {
      flat.gradients_over.reset();
      flat.weights.reset();
    }
  }
}

void StateStore::await_collectives() noexcept {
  for (const UnitState& unit : layout_.units) {
    for (const FlatBuffer& flat : unit.buffers) {
      for (const Event& event : {flat.gather_done, flat.reduce_done}) {
        try {
          event.wait();
        } catch (...) {  // a failed communicator has let go of the memory
        }
      }
    }
  }
}

FlatBuffer& StateStore::buffer_of(const TensorState& tensor) {
  return layout_.units[static_cast<std::size_t>(tensor.unit)]
      .buffers[static_cast<std::size_t>(tensor.buffer)];
}

const FlatBuffer& StateStore::buffer_of(const TensorState& tensor) const {
  return layout_.units[static_cast<std::size_t>(tensor.unit)]
      .buffers[static_cast<std::size_t>(tensor.buffer)];
}

int StateStore::find_tensor(std::string_view name) const {
  const auto found = tensor_index_.find(std::string(name));
  if (found != tensor_index_.end()) return found->second;
  std::vector<std::string> names;
  for (const TensorState& tensor : layout_.tensors) {
    names.push_back(tensor.name);
    if (std::find(tensor.aliases.begin(), tensor.aliases.end(), name) == tensor.aliases.end()) continue;
    throw InvalidArgument("'" + std::string(name) + "' is an alias of tensor '" + tensor.name +
                          "'; give that name");
  }
  const std::string closest = closest_match(name, names);
  throw InvalidArgument("the model has no tensor '" + std::string(name) + "'" +
                        (closest.empty() ? "; the first is '" + names.front() + "'"
                                         : "; the closest match is '" + closest + "'"));
}

int StateStore::index_in_unit(int unit_index, std::string_view tensor) const {
  const UnitState& unit = layout_.units[static_cast<std::size_t>(unit_index)];
  std::string names;
  for (std::size_t i = 0; i < unit.tensors.size(); ++i) {
    const std::string& name = layout_.tensors[static_cast<std::size_t>(unit.tensors[i])].name;
    if (name == tensor) return static_cast<int>(i);
    names += (names.empty() ? "" : ", ") + name;
  }
  throw InvalidArgument("unit " + unit.name + " has no tensor " + std::string(tensor) + "; it has " + names);
}

const TensorState& StateStore::tensor_in_unit(int unit_index, int index) const {
  const UnitState& unit = layout_.units[static_cast<std::size_t>(unit_index)];
  if (index < 0 || index >= static_cast<int>(unit.tensors.size())) {
    throw InvalidArgument("unit " + unit.name + " has " + std::to_string(unit.tensors.size()) +
                          " tensors, no index " + std::to_string(index));
  }
  return layout_.tensors[static_cast<std::size_t>(unit.tensors[static_cast<std::size_t>(index)])];
}

void StateStore::require_held(const TensorState& tensor) const {
  if (buffer_of(tensor).group != nullptr) return;
  const Placement& placement = layout_.placement;
  const int number = placement.first_buffer(tensor.unit) + tensor.buffer;
  throw InvalidArgument("tensor " + tensor.name + " is held by stage " +
                        std::to_string(placement.buffer(number).stages.front()) +
                        " of the pipeline, and not by this rank's");
}

std::string_view StateStore::call_name(std::string_view name) {
  if (engine_number_ == 1) return name;
  const auto found = call_names_.find(name);
  if (found != call_names_.end()) return found->second;
  return call_names_.emplace(name, std::string(name) + " of engine " + std::to_string(engine_number_))
      .first->second;
}

// --- Memory ---------------------------------------------------------------------------------------------

void StateStore::set_offload(std::unique_ptr<OffloadedState> offload) {
  offload_ = std::move(offload);
}

void StateStore::allocate_gradients(FlatBuffer& flat) {
  const std::int64_t elements = residency_.gradients_range(flat).size();
  if (residency_.keeps_last_use(flat) && !flat.last_use_gradients) {
    flat.last_use_gradients =
        Buffer(resources_.device_memory, elements * size_of(residency_.precision().accumulation),
               Category::gradients, flat.name + " last use's gradients");
  }
  if (flat.gradients || elements == 0) return;
  flat.gradients = Buffer(resources_.device_memory, elements * size_of(residency_.precision().accumulation),
                          Category::gradients, flat.name + " gradients");
}

void StateStore::allocate(FlatBuffer& flat) {
  if (flat.empty()) return;
  const DataType compute_dtype = residency_.precision().compute;
  if (flat.parameters_tier != OffloadTier::nvme) {
    const std::int64_t held = residency_.parameters_range(flat).size();
    flat.parameters =
        Buffer(flat.parameters_tier == OffloadTier::cpu ? resources_.host_memory : resources_.device_memory,
               held * size_of(compute_dtype), Category::parameters, flat.name + " parameters");
  }
  if (!flat.trainable) return;
  if (!residency_.transient_gradients(flat)) allocate_gradients(flat);
  if (flat.optimizer_tier == OffloadTier::nvme) return;
  const std::int64_t kept = residency_.optimizer_range(flat).size();
  MemoryResource& memory =
      flat.optimizer_tier == OffloadTier::cpu ? resources_.host_memory : resources_.device_memory;
  if (residency_.separate_master(flat)) {
    flat.master = Buffer(memory, kept * size_of(residency_.master_type(flat)), Category::optimizer,
                         flat.name + " master");
  }
  for (const OptimizerStateTensor& state : flat.states) {
    flat.state.emplace_back(memory, bytes_of(state.dtype, kept), Category::optimizer,
                            flat.name + " " + state.name);
  }
}

void StateStore::allocate(UnitState& unit) {
  for (FlatBuffer& flat : unit.buffers) flat.weights->allocate(resources_.device_memory);
  for (FlatBuffer& flat : unit.buffers) allocate(flat);
  if (!offload_) return;
  for (FlatBuffer& flat : unit.buffers) offload_->allocate(flat);
}

// --- Elements -------------------------------------------------------------------------------------------

ShardSlice StateStore::slice(FlatBuffer& flat, ElementRange range) {
  ShardSlice slice = residency_.slice(flat, range);
  slice.stream = slice.on_host ? &offload_->host() : &compute_;
  return slice;
}

ShardSlice StateStore::slice_in_step(FlatBuffer& flat) {
  ShardSlice kept = slice(flat, residency_.optimizer_range(flat));
  if (kept.on_host) {
    kept.stream->wait(flat.gradients_on_host);
    kept.gradient = residency_.host_gradients(flat, kept.range);
    return kept;
  }
  kept.gradient = residency_.gradients(flat, kept.range);
  if (flat.master && !residency_.offloaded(flat)) kept.weight = residency_.parameters(flat, kept.range);
  return kept;
}

void StateStore::visit_in_step(FlatBuffer& flat, const std::function<void(const ShardSlice&)>& visit) {
  if (flat.optimizer_tier != OffloadTier::nvme) {
    const ShardSlice kept = slice_in_step(flat);
    if (flat.optimizer_stays && observer_ != nullptr) observer_->before_update(flat, kept);
    return visit(kept);
  }
  offload_->host().wait(flat.gradients_on_host);
  offload_->visit_next(flat, [&](ShardSlice tile) {
    if (observer_ != nullptr) observer_->before_update(flat, tile);
    tile.gradient = residency_.host_gradients(flat, tile.range);
    visit(tile);
  });
}

void StateStore::visit(FlatBuffer& flat, ElementRange range, Access access,
                       const std::function<void(const ShardSlice&)>& visit) {
  if (range.empty()) return;
  if (access != Access::read) await_gathers(flat);  // fp32 weights may be the master weights
  // A save in progress stores the state as it was when the save began.
  if (flat.in_tiles() && access != Access::read && observer_ != nullptr) observer_->before_write();
  if (flat.optimizer_tier != OffloadTier::nvme) {
    const ShardSlice whole = slice(flat, range);
    if (whole.on_host) whole.stream->synchronize();  // an update may be in progress
    visit(whole);
    whole.stream->synchronize();
    return;
  }
  // A tile of which only a part is replaced keeps the rest.
  const bool read = access != Access::replace || !(range == residency_.optimizer_range(flat));
  offload_->visit_tiles(flat, range, read, access != Access::read,
                        [&](const ShardSlice& tile) { visit(part_of(tile, intersect(tile.range, range))); });
}

void StateStore::read(void* to, const void* from, std::int64_t bytes, bool on_host) {
  if (simulated() || bytes == 0) return;
  if (on_host) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
    return;
  }
  resources_.device.copy_to_host(compute_, to, from, bytes);
  compute_.synchronize();
}

void StateStore::write(void* to, const void* from, std::int64_t bytes, bool on_host) {
  if (simulated() || bytes == 0) return;
  if (on_host) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
    return;
  }
  resources_.device.copy_from_host(compute_, to, from, bytes);
  compute_.synchronize();
}

void StateStore::read_halves(const ShardSlice& slice, float* to) {
  if (simulated()) return;
  for_halves(slice.range.size(),
             [&](std::int64_t first, std::int64_t count, bfloat16* high, std::uint16_t* low) {
               read(high, slice.weight.as<bfloat16>() + first, 2 * count, slice.on_host);
               read(low, slice.master.as<std::uint16_t>() + first, 2 * count, slice.on_host);
               for (std::int64_t i = 0; i < count; ++i) to[first + i] = join_float({high[i], low[i]});
             });
}

void StateStore::write_halves(const ShardSlice& slice, const float* from) {
  if (simulated()) return;
  for_halves(slice.range.size(),
             [&](std::int64_t first, std::int64_t count, bfloat16* high, std::uint16_t* low) {
               for (std::int64_t i = 0; i < count; ++i) {
                 const SplitFloat parts = split_float(from[first + i]);
                 high[i] = parts.high;
                 low[i] = parts.low;
               }
               write(slice.weight.as<bfloat16>() + first, high, 2 * count, slice.on_host);
               write(slice.master.as<std::uint16_t>() + first, low, 2 * count, slice.on_host);
             });
}

void StateStore::await_gathers(const FlatBuffer& flat) {
  flat.gather_done.wait();
  flat.shard_ready.wait();
}

void StateStore::await_parameters(const FlatBuffer& flat) {
  await_gathers(flat);
  if (!offload_) return;
  offload_->await_updates();
  for (Stream* stream : {&offload_->link().to_host_stream(), &offload_->link().from_host_stream()}) {
    stream->synchronize();
  }
}

void StateStore::read_parameters(FlatBuffer& flat, ElementRange range, void* to) {
  await_parameters(flat);
  if (flat.parameters_tier == OffloadTier::nvme) return offload_->read_parameters(flat, range, to);
  const TensorView from = residency_.parameters(flat, range);
  read(to, from.data, from.bytes(), flat.parameters_tier == OffloadTier::cpu);
}

void StateStore::write_parameters(FlatBuffer& flat, ElementRange range, const void* from) {
  await_parameters(flat);
  if (flat.parameters_tier == OffloadTier::nvme) return offload_->write_parameters(flat, range, from);
  const TensorView to = residency_.parameters(flat, range);
  write(to.data, from, to.bytes(), flat.parameters_tier == OffloadTier::cpu);
}

void StateStore::gather_updated(FlatBuffer& flat, const char* phase) {
  if (flat.empty()) return;
  flat.weights->gather_updated(flat, for_training_.value_or(true),
                               {call_name(flat.name), phase, Traffic::data});
}

void StateStore::publish(FlatBuffer& flat, const char* phase) {
  const ElementRange kept = residency_.optimizer_range(flat);
  await_gathers(flat);
  if (residency_.offloaded(flat)) {
    visit(flat, kept, Access::read, [&](const ShardSlice& slice) { offload_->publish(flat, slice); });
  } else {
    restore_weights(flat);
    flat.shard_ready = compute_.record();
  }
  gather_updated(flat, phase);
}

void StateStore::restore_weights(FlatBuffer& flat) {
  if (!flat.master) return;
  ShardSlice kept = slice(flat, residency_.optimizer_range(flat));
  kept.weight = residency_.parameters(flat, kept.range);
  for (const TensorPiece& piece : flat.layout.pieces(kept.range)) {
    copy_master_to_weight(part_of(kept, {piece.buffer_begin, piece.buffer_begin + piece.elements}));
  }
}

void StateStore::set_weights_for(bool training) {
  if (for_training_ == training) return;
  for_training_ = training;
  for (FlatBuffer* flat : trainable_) {
    if (!flat->empty() && residency_.whole_parameters(*flat) && flat->weights->rounds()) {
      publish(*flat, training ? "forward" : "evaluate");
    }
  }
}

}  // namespace tranche::detail
