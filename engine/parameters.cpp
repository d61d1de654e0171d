// Gathering: how full parameters of a unit come to be where a model can read them.

#include <algorithm>
#include <exception>
#include <utility>

#include "engine/gathering.h"
#include "engine/offloading.h"

namespace tranche {

void Engine::Impl::Gathering::acquire(int index) {
  UnitState& unit = engine.units[index];
  engine.require(engine.in_micro_batch, "gather(" + unit.name + ") outside a micro-batch");
  // Backward has begun with the first gradients of the micro-batch; recomputation is part of it.
  const bool backward = std::any_of(engine.units.begin(), engine.units.end(),
                                    [](const UnitState& u) { return u.uses_begun > 0; });
  engine.set_phase(engine.in_evaluation ? "evaluate" : backward ? "backward" : "forward", unit.name);
  GatherOrder& expected = order();
  const bool in_order = expected.known && expected.position < expected.units.size() &&
                        expected.units[expected.position] == index;
  if (expected.known && !in_order) {
    // Another order than recorded: what was fetched ahead is of no use, and nothing more is fetched ahead in
    // this micro-batch, whose order is recorded for the next.
    expected.known = false;
    drop_prefetched();
  }
  if (!engine.residency.whole_parameters() && !unit.resident) {
    if (resident_units >= engine.config.depth) drop_prefetched();
    if (resident_units >= engine.config.depth) {
      std::string holders;
      for (const UnitState& other : engine.units) {
        if (other.holders > 0) holders += (holders.empty() ? "" : ", ") + other.name;
      }
      throw LogicError("gather(" + unit.name + ") would hold " + std::to_string(resident_units + 1) +
                       " units at once, but tranche.depth is " + std::to_string(engine.config.depth) +
                       "; held now: " + holders + ". Let a handle go first or raise tranche.depth");
    }
    issue(index);
  }
  observed.push_back(index);
  if (in_order) ++expected.position;
  ++unit.holders;
  // Waits for the rest of the offloaded update, then for the rest of the gather.
  if (engine.residency.offloaded(unit)) engine.exposed.wait_for(unit.shard_ready, Exposed::offload);
  for (const FlatState* flat : {&unit.trainable, &unit.frozen}) {
    engine.exposed.wait_for(flat->filled, Exposed::gather);
  }
  prefetch();
}

void Engine::Impl::Gathering::issue(int index) {
  UnitState& unit = engine.units[index];
  const DataType dtype = engine.config.precision.compute;
  for (FlatState* flat : {&unit.trainable, &unit.frozen}) {
    if (flat->layout.padded_elements() == 0) continue;
    flat->gathered = engine.arena->acquire(flat->layout.padded_elements() * size_of(dtype),
                                           Category::gathered, unit.name + " gathered");
    std::vector<Event> ready = flat->gathered.ready();
    ready.push_back(unit.shard_ready);
    ready.push_back(flat->filled);  // one gather at a time reads the shard: the last stands for all
    const OperationLabel label{unit.name, engine.in_evaluation ? "evaluate" : "forward_backward",
                               Traffic::data};
    const void* from = flat->parameters.data();
    if (flat->parameters_tier != OffloadTier::none) {
      // To its place among the others', where it is sent from.
      std::byte* place = static_cast<std::byte*>(flat->gathered.data()) +
                         flat->layout.shard_range(engine.rank).begin * size_of(dtype);
      flat->filled = engine.offload->bring_shard(unit, *flat, place, std::move(ready));
      ready = {flat->filled};
      from = place;
    }
    if (engine.ranks > 1) {
      flat->filled = engine.shard.all_gather(from, flat->gathered.data(), flat->layout.shard_elements(),
                                             dtype, engine.config.allgather_bucket_elements, ready, label);
    }
    if (!engine.config.overlap) flat->filled.wait();
    step_elements += flat->layout.padded_elements();
  }
  unit.resident = true;
  ++resident_units;
}

void Engine::Impl::Gathering::prefetch() {
  if (engine.residency.whole_parameters() || !engine.config.overlap) return;
  GatherOrder& expected = order();
  if (!expected.known) return;
  // The next micro-batch of the same step begins with the same units; the step's last has no successor.
  const bool wraps = !engine.in_evaluation && engine.micro_batch + 1 < engine.config.accumulation_steps;
  const std::size_t length = expected.units.size();
  std::int64_t beyond = 0;  // elements fetched ahead of use, the next unit's apart
  std::int64_t live = 0;
  for (const UnitState& unit : engine.units) {
    if (!unit.resident) continue;
    live += unit.gathered_elements();
    if (unit.holders == 0) beyond += unit.gathered_elements();
  }
  for (std::size_t next = expected.position; resident_units < engine.config.depth; ++next) {
    if (next >= length && (!wraps || next >= 2 * length)) return;
    const int index = expected.units[next % length];
    UnitState& unit = engine.units[index];
    const std::int64_t elements = unit.gathered_elements();
    const bool is_next = next == expected.position;
    if (unit.resident) {
      // Held now and wanted again: it will be gathered on demand, and nothing behind it overtakes.
      if (unit.holders > 0) return;
      if (is_next) beyond -= elements;
      continue;
    }
    // The next unit is fetched however large it is: were it not, its whole gather would be waited for. The
    // keys bound what comes beyond it.
    if (!is_next && (beyond + elements > engine.config.prefetch_elements ||
                     live + elements > engine.config.max_live_elements))
      return;
    issue(index);
    live += elements;
    if (!is_next) beyond += elements;
  }
}

void Engine::Impl::Gathering::drop_prefetched() {
  for (UnitState& unit : engine.units) {
    if (unit.resident && unit.holders == 0) free_gathered(unit, /*read=*/false);
  }
}

void Engine::Impl::Gathering::free_gathered(UnitState& unit, bool read) noexcept {
  // Reuse of the slot waits for the gather that fills it. Who read it had the compute stream wait for that
  // first, so the readers' point covers both. `filled` stays: peers may still be reading this rank's shard.
  for (FlatState* flat : {&unit.trainable, &unit.frozen}) {
    if (!flat->gathered) continue;
    if (read) {
      flat->gathered.used_on(engine.compute);  // its release() copes with a stream that has failed
      flat->gathered.release();
    } else {
      flat->gathered.release(flat->filled);
    }
  }
  unit.resident = false;
  --resident_units;
}

void Engine::Impl::Gathering::release(int index, bool unwinding) noexcept {
  UnitState& unit = engine.units[index];
  --unit.holders;
  if (engine.residency.whole_parameters() || unit.holders > 0) return;
  free_gathered(unit, /*read=*/true);
  if (unwinding) {
    prefetch_owed = true;
    return;
  }
  try {
    if (engine.in_micro_batch && !engine.broken) prefetch();
  } catch (...) {
    // A handle's release must not throw; the next call does.
    engine.break_down(std::current_exception());
  }
}

void Engine::Impl::Gathering::end_micro_batch() {
  GatherOrder& expected = order();
  if (!expected.known || expected.position != expected.units.size()) {
    if (expected.known) drop_prefetched();
    expected.units = observed;
    expected.known = true;
  }
  observed.clear();
  expected.position = 0;
}

void Engine::Impl::Gathering::forget_micro_batch() {
  drop_prefetched();
  order() = {};
  observed.clear();
}

void Engine::Impl::catch_up() {
  if (!std::exchange(gathering->prefetch_owed, false)) return;
  if (in_micro_batch) gathering->prefetch();
}

ConstTensorView Engine::Impl::parameter_view(int unit_index, int index) const {
  const UnitState& unit = units[unit_index];
  if (index < 0 || index >= static_cast<int>(unit.tensors.size())) {
    throw InvalidArgument("unit " + unit.name + " has " + std::to_string(unit.tensors.size()) +
                          " tensors, no index " + std::to_string(index));
  }
  const TensorState& tensor = tensors[unit.tensors[index]];
  const FlatState& flat = tensor.frozen ? unit.frozen : unit.trainable;
  const DataType dtype = config.precision.compute;
  const void* base = residency.whole_parameters() ? flat.parameters.data() : flat.gathered.data();
  return {static_cast<const std::byte*>(base) + flat.layout.tensor_offset(tensor.flat_index) * size_of(dtype),
          dtype, tensor.shape};
}

int Engine::Impl::index_in_unit(int unit_index, std::string_view tensor) const {
  const UnitState& unit = units[unit_index];
  std::string names;
  for (std::size_t i = 0; i < unit.tensors.size(); ++i) {
    const std::string& name = tensors[unit.tensors[i]].name;
    if (name == tensor) return static_cast<int>(i);
    names += (names.empty() ? "" : ", ") + name;
  }
  throw InvalidArgument("unit " + unit.name + " has no tensor " + std::string(tensor) + "; it has " + names);
}

// --- GatheredUnit ---------------------------------------------------------------------------------------

GatheredUnit::GatheredUnit(GatheredUnit&& other) noexcept
    : engine_(std::exchange(other.engine_, nullptr)), unit_(other.unit_), exceptions_(other.exceptions_) {}

GatheredUnit& GatheredUnit::operator=(GatheredUnit&& other) noexcept {
  if (this != &other) {
    release();
    engine_ = std::exchange(other.engine_, nullptr);
    unit_ = other.unit_;
    exceptions_ = other.exceptions_;
  }
  return *this;
}

void GatheredUnit::release() noexcept {
  if (engine_ == nullptr) return;
  engine_->impl_->gathering->release(unit_, std::uncaught_exceptions() > exceptions_);
  engine_ = nullptr;
}

ConstTensorView GatheredUnit::tensor(int index) const {
  if (engine_ == nullptr) throw LogicError("tensor() of a gathered unit that was released");
  return engine_->impl_->parameter_view(unit_, index);
}

ConstTensorView GatheredUnit::tensor(std::string_view name) const {
  if (engine_ == nullptr) throw LogicError("tensor() of a gathered unit that was released");
  return tensor(engine_->impl_->index_in_unit(unit_, name));
}

}  // namespace tranche
