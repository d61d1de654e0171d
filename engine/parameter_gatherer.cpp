#include "engine/parameter_gatherer.h"

#include <string>
#include <utility>

#include "engine/exchange.h"
#include "engine/offloaded_state.h"
#include "tranche/core/error.h"

namespace tranche::detail {

ParameterGatherer::ParameterGatherer(StateStore& store, const GatherOptions& options, StepArena& arena,
                                     Stream& compute, ExposedTime& exposed)
    : store_(store),
      options_(options),
      arena_(arena),
      compute_(compute),
      exposed_(exposed),
      states_(store.units().size()) {
  for (std::size_t u = 0; u < states_.size(); ++u) {
    states_[u].buffers.resize(store.units()[u].buffers.size());
    gathers_ = gathers_ || store.residency().gathers(store.units()[u]);
  }
}

ParameterGatherer::~ParameterGatherer() {
  store_.await_collectives();
}

void ParameterGatherer::begin_sequence(Program program, bool another_follows) {
  program_ = program;
  another_follows_ = another_follows;
  in_sequence_ = true;
}

void ParameterGatherer::acquire(int index) {
  UnitState& unit = store_.units()[static_cast<std::size_t>(index)];
  Order& expected = order();
  const bool in_order = expected.known && expected.position < expected.units.size() &&
                        expected.units[expected.position] == index;
  if (expected.known && !in_order) {
    // The order differs from the recorded one: prefetched units are useless, and nothing more is prefetched
    // in this sequence, whose order is recorded for the next.
    expected.known = false;
    drop_unused();
  }
  if (std::exchange(at(index).kept, false)) ++resident_units_;
  if (store_.residency().gathers(unit) && !at(index).resident) {
    if (resident_units_ >= options_.depth) drop_unused();
    if (resident_units_ >= options_.depth && !keeps()) {
      std::string held;
      for (std::size_t u = 0; u < states_.size(); ++u) {
        if (states_[u].holders > 0) held += (held.empty() ? "" : ", ") + store_.units()[u].name;
      }
      throw LogicError("gather(" + unit.name + ") would hold " + std::to_string(resident_units_ + 1) +
                       " units at once, but tranche.depth is " + std::to_string(options_.depth) +
                       "; held now: " + held + ". Let a handle go first or raise tranche.depth");
    }
    issue(index);
  }
  observed_.push_back(index);
  if (in_order) ++expected.position;
  ++at(index).holders;
  // Waits for the rest of the offloaded update, then for the rest of the gather.
  for (const FlatBuffer& flat : unit.buffers) {
    if (store_.residency().offloaded(flat)) exposed_.wait_for(flat.shard_ready, Exposed::offload);
  }
  for (const FlatBuffer& flat : unit.buffers) exposed_.wait_for(flat.gather_done, Exposed::gather);
  gather_ahead();
}

void ParameterGatherer::issue(int index) {
  UnitState& unit = store_.units()[static_cast<std::size_t>(index)];
  UnitGather& state = at(index);
  const DataType dtype = store_.residency().precision().compute;
  for (std::size_t b = 0; b < unit.buffers.size(); ++b) {
    FlatBuffer& flat = unit.buffers[b];
    if (flat.empty() || store_.residency().whole_parameters(flat)) continue;
    StepBuffer& whole = state.buffers[b];
    whole = arena_.acquire(flat.layout.padded_elements() * size_of(dtype), Category::gathered,
                           unit.name + " gathered");
    std::vector<Event> ready = whole.ready();
    ready.push_back(flat.shard_ready);
    ready.push_back(flat.gather_done);  // gathers read the shard in order: the last event covers all
    const void* from = flat.parameters.data();
    if (flat.parameters_tier != OffloadTier::none) {
      // The shard is copied to its place in the whole buffer, and is sent from there.
      std::byte* place = static_cast<std::byte*>(whole.data()) + flat.shard().begin * size_of(dtype);
      flat.gather_done = store_.offload()->fetch_shard(flat, place, std::move(ready));
      ready = {flat.gather_done};
      from = place;
    }
    const bool training = program_ == Program::train;
    flat.weights->gather(
        flat, {from, dtype, Shape{flat.layout.shard_elements()}},
        {whole.data(), dtype, Shape{flat.layout.padded_elements()}}, ready, training,
        {store_.call_name(unit.name), training ? "forward_backward" : "evaluate", Traffic::data});
    if (training && flat.weights->rounds()) quantized_elements_ += flat.layout.padded_elements();
    if (!options_.overlap) flat.gather_done.wait();
    gathered_elements_ += flat.layout.padded_elements();
  }
  state.resident = true;
  ++resident_units_;
}

void ParameterGatherer::gather_ahead() {
  if (!gathers_ || !options_.overlap) return;
  Order& expected = order();
  if (!expected.known) return;
  const std::size_t length = expected.units.size();
  std::int64_t beyond = 0;  // prefetched elements, without the next unit's
  std::int64_t live = 0;
  bool first = true;  // the next unit has not been seen yet
  for (std::size_t u = 0; u < states_.size(); ++u) {
    if (!states_[u].resident) continue;
    const std::int64_t elements = store_.units()[u].gathered_elements();
    live += elements;
    if (states_[u].holders == 0 && !states_[u].kept) beyond += elements;
  }
  for (std::size_t next = expected.position; resident_units_ < options_.depth; ++next) {
    // The next sequence begins with the same units; without a next one, the last unit has no successor.
    if (next >= length && (!another_follows_ || next >= 2 * length)) return;
    const int index = expected.units[next % length];
    const UnitState& unit = store_.units()[static_cast<std::size_t>(index)];
    if (!store_.residency().gathers(unit) || at(index).kept) continue;
    if (keeps() && at(index).holders > 0) continue;
    const std::int64_t elements = unit.gathered_elements();
    const bool is_next = std::exchange(first, false);
    if (at(index).resident) {
      // It is held now and requested again later; that request gathers it, and later units must not be
      // gathered before it.
      if (at(index).holders > 0) return;
      if (is_next) beyond -= elements;
      continue;
    }
    // The next unit is always gathered, whatever its size, because otherwise the whole gather would be
    // exposed. The configured limits apply to units after it.
    if (!is_next &&
        (beyond + elements > options_.prefetch_elements || live + elements > options_.max_live_elements)) {
      return;
    }
    issue(index);
    live += elements;
    if (!is_next) beyond += elements;
  }
}

void ParameterGatherer::drop_unused() {
  if (keeps()) return;  // it is used later in the step, or freed at its end
  for (std::size_t u = 0; u < states_.size(); ++u) {
    if (states_[u].resident && states_[u].holders == 0) free_unit(static_cast<int>(u), /*read=*/false);
  }
}

void ParameterGatherer::free_unit(int index, bool read) noexcept {
  // Reuse of the slot must wait for the gather that fills it. If the unit was held, the compute stream has
  // waited for that gather, so the stream's present point covers both. `gather_done` is kept, because peers
  // may still read this rank's shard.
  UnitGather& state = at(index);
  for (std::size_t b = 0; b < state.buffers.size(); ++b) {
    StepBuffer& whole = state.buffers[b];
    if (!whole) continue;
    if (read) {
      whole.used_on(compute_);  // release() also handles a stream that has failed
      whole.release();
    } else {
      whole.release(store_.units()[static_cast<std::size_t>(index)].buffers[b].gather_done);
    }
  }
  state.resident = false;
  --resident_units_;
}

void ParameterGatherer::release(int index, Ahead ahead) {
  UnitGather& state = at(index);
  --state.holders;
  if (!state.resident || state.holders > 0) return;
  if (keeps()) {
    state.kept = true;
    --resident_units_;
  } else {
    free_unit(index, /*read=*/true);
  }
  if (ahead == Ahead::later) owes_gathers_ = true;
  if (ahead == Ahead::now && in_sequence_) gather_ahead();
}

void ParameterGatherer::catch_up() {
  if (std::exchange(owes_gathers_, false) && in_sequence_) gather_ahead();
}

void ParameterGatherer::end_sequence() {
  Order& expected = order();
  if (!expected.known || expected.position != expected.units.size()) {
    if (expected.known) drop_unused();
    expected.units = observed_;
    expected.known = true;
  }
  observed_.clear();
  expected.position = 0;
  in_sequence_ = false;
}

void ParameterGatherer::end_step() {
  for (std::size_t u = 0; u < states_.size(); ++u) {
    if (!states_[u].resident) continue;
    const bool read = std::exchange(states_[u].kept, false);
    if (read) ++resident_units_;
    free_unit(static_cast<int>(u), read);
  }
}

void ParameterGatherer::abandon_sequence() {
  drop_unused();
  order() = {};
  observed_.clear();
  in_sequence_ = false;
}

ConstTensorView ParameterGatherer::view(int index, int position) const {
  const TensorState& tensor = store_.tensor_in_unit(index, position);
  store_.require_held(tensor);
  const FlatBuffer& flat = store_.buffer_of(tensor);
  const DataType dtype = store_.residency().precision().compute;
  const StepBuffer& whole =
      states_[static_cast<std::size_t>(index)].buffers[static_cast<std::size_t>(tensor.buffer)];
  const void* base = store_.residency().whole_parameters(flat) ? flat.parameters.data() : whole.data();
  return {static_cast<const std::byte*>(base) + flat.layout.tensor_offset(tensor.flat_index) * size_of(dtype),
          dtype, tensor.local};
}

std::int64_t ParameterGatherer::take_quantized_elements() {
  return std::exchange(quantized_elements_, 0);
}

std::int64_t ParameterGatherer::take_gathered_elements() {
  return std::exchange(gathered_elements_, 0);
}

}  // namespace tranche::detail
