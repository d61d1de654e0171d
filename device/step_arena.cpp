#include "tranche/device/step_arena.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <utility>

#include "device/packing.h"
#include "tranche/core/error.h"
#include "tranche/device/stream.h"

namespace tranche {
namespace {

/// One request of a program's recorded pass, and the place that packing gives it.
struct PlannedSlot {
  std::int64_t bytes = 0;
  Category category = Category::other;
  detail::PackingInterval interval;
  std::int64_t released_at = 0;  // the number of requests made before its release
  std::int64_t offset = 0;
};

/// A recorded pass, with room for the largest of the passes with the same sequence of requests.
struct Plan {
  std::vector<PlannedSlot> slots;
  std::vector<std::optional<Shape>> shapes;  // largest extents by micro-batch; none: ranks differed
  std::int64_t block_bytes = 0;
  std::int64_t live_peak = 0;
};

/// The shape of earlier passes, and the plan that the last of them followed.
struct KnownShape {
  Shape shape;
  std::shared_ptr<Plan> plan;
};

struct Program {
  std::string name;
  std::vector<KnownShape> known;  // most recently used first
};

/// True where the plan has seen extents at least as large in this micro-batch.
bool within(const Shape& shape, const Plan& plan, std::size_t micro_batch) {
  if (micro_batch >= plan.shapes.size() || !plan.shapes[micro_batch]) return false;
  const std::span<const std::int64_t> extents = shape.extents(), seen = plan.shapes[micro_batch]->extents();
  return std::equal(extents.begin(), extents.end(), seen.begin(), seen.end(), std::less_equal<>());
}

void add_shapes(Plan& plan, const std::vector<Shape>& shapes) {
  for (std::size_t m = 0; m < shapes.size(); ++m) {
    if (m >= plan.shapes.size()) plan.shapes.emplace_back(shapes[m]);
    std::optional<Shape>& largest = plan.shapes[m];
    if (largest && largest->rank() != shapes[m].rank()) largest.reset();
    if (!largest) continue;
    std::vector<std::int64_t> extents(shapes[m].extents().begin(), shapes[m].extents().end());
    for (std::size_t axis = 0; axis < extents.size(); ++axis) {
      extents[axis] = std::max(extents[axis], largest->extents()[axis]);
    }
    largest = Shape(std::span<const std::int64_t>(extents));
  }
}

bool alike(const std::vector<PlannedSlot>& a, const std::vector<PlannedSlot>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const PlannedSlot& x, const PlannedSlot& y) { return x.category == y.category; });
}

enum class Source { none, resource, block, empty };

/// An outstanding buffer. Entries are reused, so a planned pass allocates nothing.
struct Held {
  Source source = Source::none;
  void* data = nullptr;
  std::int64_t bytes = 0;
  std::int64_t offset = 0;  // in the block
  Category category = Category::other;
  std::string tag;
  std::int64_t pass = -1;         // -1: acquired outside any pass
  std::int64_t recorded_as = -1;  // index among the recorded slots of that pass
};

/// A released range of the block whose last owner's work may still run.
struct Pending {
  std::int64_t offset;
  std::int64_t end;
  Event after;
};

enum class Mode { idle, dynamic, recording, planned, fallen_back };

void wait_quietly(const Event& event) noexcept {
  // A failure is reported to those who wait for the work itself; the memory is free either way.
  try {
    event.wait();
  } catch (...) {
  }
}

}  // namespace

struct StepArena::Impl {
  MemoryResource& resource;
  Ledger& ledger;
  Tier tier;

  std::vector<std::unique_ptr<Program>> programs;
  Program* program = nullptr;  // of the current pass
  std::shared_ptr<Plan> plan;  // of the current pass, if it is replayed
  std::vector<Shape> shapes;   // of the current pass, by micro-batch
  Mode mode = Mode::idle;
  std::int64_t pass = 0;
  std::size_t next_slot = 0;
  std::int64_t instant = 0;
  std::vector<PlannedSlot> recorded;
  std::int64_t packings = 0, dropped = 0;

  Buffer block;
  std::vector<Held> held;
  std::vector<std::int64_t> free_entries;
  std::map<std::int64_t, std::int64_t> occupied;  // ranges of the block: offset -> end, disjoint
  std::vector<Pending> pending;
  std::size_t sweep_at = 64;
  PoisonFill poison;                                              // empty: none
  alignas(memory_alignment) std::byte nothing[memory_alignment];  // the address of empty buffers

  Impl(MemoryResource& upstream, Ledger& its_ledger)
      : resource(upstream), ledger(its_ledger), tier(upstream.tier()) {}

  Program* find(std::string_view name) const {
    for (const auto& candidate : programs) {
      if (candidate->name == name) return candidate.get();
    }
    return nullptr;
  }

  std::int64_t block_needed() const {
    std::int64_t bytes = 0;
    for (const auto& candidate : programs) {
      for (const KnownShape& known : candidate->known) bytes = std::max(bytes, known.plan->block_bytes);
    }
    return bytes;
  }

  /// The plan that a pass of `shape` will probably follow; null when none has room for it.
  std::shared_ptr<Plan> plan_for(const Program& of, const Shape& its_shape) const {
    for (const KnownShape& known : of.known) {
      if (known.shape == its_shape) return known.plan;
    }
    for (const KnownShape& known : of.known) {
      if (within(its_shape, *known.plan, 0)) return known.plan;
    }
    return nullptr;
  }

  void settle() noexcept {
    for (const Pending& piece : pending) wait_quietly(piece.after);
    pending.clear();
  }

  void free_block() noexcept {
    if (!block) return;
    settle();
    ledger.assigned_to_step(tier, Category::other, -aligned_bytes(block.bytes()));
    block.reset();
  }

  // Gives the block the size that all planned programs need. The old block is freed first, so both never
  // count.
  void fit_block() {
    const std::int64_t bytes = block_needed();
    if (bytes <= block.bytes() || !occupied.empty()) return;
    free_block();
    block = Buffer(resource, bytes, Category::other, std::string(step_arena_tag));
    ledger.assigned_to_step(tier, Category::other, aligned_bytes(bytes));
  }

  bool block_is_free(std::int64_t offset, std::int64_t end) const {
    const auto after = occupied.lower_bound(end);
    return after == occupied.begin() || std::prev(after)->second <= offset;
  }

  // Collects the pending events of earlier owners of [offset, end), and removes those that have passed.
  void collect_ready(std::int64_t offset, std::int64_t end, std::vector<Event>& ready) {
    // On GPUs, querying an event costs a driver call, and a host that runs ahead leaves hundreds pending. So
    // only the overlapping ones are queried; the others are when there are many.
    const bool sweep = pending.size() >= sweep_at;
    std::erase_if(pending, [&](const Pending& piece) {
      const bool in_the_way = piece.offset < end && offset < piece.end;
      if (!in_the_way && !sweep) return false;
      if (piece.after.query()) return true;
      if (in_the_way) ready.push_back(piece.after);
      return false;
    });
    if (sweep) sweep_at = std::max<std::size_t>(64, 2 * pending.size());
  }

  std::int64_t new_entry() {
    if (free_entries.empty()) {
      held.emplace_back();
      free_entries.reserve(held.size());  // so that returning an entry does not allocate
      return static_cast<std::int64_t>(held.size()) - 1;
    }
    const std::int64_t entry = free_entries.back();
    free_entries.pop_back();
    return entry;
  }

  // The planned place of the next acquire, if the request matches the recorded one and the place is free.
  std::optional<std::int64_t> planned_offset(std::int64_t bytes, Category category) {
    if (next_slot >= plan->slots.size()) return std::nullopt;
    const PlannedSlot& slot = plan->slots[next_slot];
    if (bytes > slot.bytes || slot.category != category) return std::nullopt;
    if (bytes > 0 && !block_is_free(slot.offset, slot.offset + aligned_bytes(bytes))) return std::nullopt;
    ++next_slot;
    return slot.offset;
  }

  std::string holders(std::int64_t of_pass) const {
    std::string text;
    int count = 0;
    for (const Held& entry : held) {
      if (entry.source == Source::none || (of_pass >= 0 && entry.pass != of_pass)) continue;
      if (++count > 8) continue;
      text += fmt::format("{}'{}' ({}, {})", count > 1 ? ", " : "", entry.tag, name_of(entry.category),
                          format_bytes(entry.bytes));
    }
    if (count > 8) text += fmt::format(" and {} more", count - 8);
    return text;
  }

  void pack(Plan& of) {
    std::vector<detail::PackingInterval> intervals;
    intervals.reserve(of.slots.size());
    for (const PlannedSlot& slot : of.slots) intervals.push_back(slot.interval);
    const detail::Packing packing = detail::pack_intervals(intervals);
    for (std::size_t i = 0; i < of.slots.size(); ++i) of.slots[i].offset = packing.offsets[i];
    of.live_peak = packing.live_peak;
    of.block_bytes = packing.bytes;
    ++packings;
  }

  /// Enlarges the plan for the recorded pass, which has the same sequence of requests. True if it had to
  /// grow.
  bool widen(Plan& of) const {
    bool wider = false, same_instants = true;
    for (std::size_t i = 0; i < recorded.size(); ++i) {
      const detail::PackingInterval &old = of.slots[i].interval, &now = recorded[i].interval;
      same_instants = same_instants && old.begin == now.begin && old.end == now.end;
      wider = wider || now.bytes > old.bytes || recorded[i].released_at > of.slots[i].released_at;
    }
    if (!wider) return false;
    for (std::size_t i = 0; i < recorded.size(); ++i) {
      PlannedSlot& slot = of.slots[i];
      slot.bytes = slot.interval.bytes = std::max(slot.bytes, recorded[i].bytes);
      slot.released_at = std::max(slot.released_at, recorded[i].released_at);
      // Instants also count releases. If the passes differ in the order of releases, only request numbers are
      // comparable.
      if (!same_instants) slot.interval = {static_cast<std::int64_t>(i), slot.released_at, slot.bytes};
    }
    return true;
  }

  /// The plan for the recorded pass: an existing plan with the same requests, widened, or a new one.
  std::shared_ptr<Plan> plan_recorded() {
    for (const KnownShape& known : program->known) {
      Plan& candidate = *known.plan;
      if (!alike(candidate.slots, recorded)) continue;
      if (widen(candidate)) pack(candidate);
      return known.plan;
    }
    auto made = std::make_shared<Plan>();
    made->slots = recorded;
    pack(*made);
    return made;
  }

  /// Remembers that the pass with the current shapes followed `its_plan`, or that the plan was made from it.
  void remember(const std::shared_ptr<Plan>& its_plan) {
    add_shapes(*its_plan, shapes);
    std::vector<KnownShape>& known = program->known;
    const auto found = std::find_if(known.begin(), known.end(),
                                    [&](const KnownShape& each) { return each.shape == shapes.front(); });
    if (found == known.end()) {
      known.insert(known.begin(), {shapes.front(), its_plan});
    } else {
      found->plan = its_plan;
      std::rotate(known.begin(), found, found + 1);
    }
    if (known.size() <= most_shapes) return;
    if (known.back().plan.use_count() == 1) ++dropped;
    known.pop_back();
  }
};

// ---- the buffer

StepBuffer::StepBuffer(StepBuffer&& other) noexcept
    : arena_(std::move(other.arena_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      slot_(std::exchange(other.slot_, -1)),
      stream_(std::exchange(other.stream_, nullptr)),
      ready_(std::exchange(other.ready_, {})) {}

StepBuffer& StepBuffer::operator=(StepBuffer&& other) noexcept {
  if (this == &other) return *this;
  release();
  arena_ = std::move(other.arena_);
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  slot_ = std::exchange(other.slot_, -1);
  stream_ = std::exchange(other.stream_, nullptr);
  ready_ = std::exchange(other.ready_, {});
  return *this;
}

void StepBuffer::release() noexcept {
  if (arena_ == nullptr) return;
  Event after;
  if (stream_ != nullptr && *arena_ != nullptr) {
    try {
      after = stream_->record();
    } catch (...) {
      // Without an event the memory could be reused too early, so this waits for the stream.
      try {
        stream_->synchronize();
      } catch (...) {
        // The stream has failed: nothing that it holds will be read any more.
      }
    }
  }
  release(after);
}

void StepBuffer::release(const Event& after) noexcept {
  if (arena_ == nullptr) return;
  if (*arena_ != nullptr) (*arena_)->give_back(slot_, after);
  arena_.reset();
  data_ = nullptr;
  bytes_ = 0;
  slot_ = -1;
  stream_ = nullptr;
  ready_.clear();
}

// ---- the arena

StepArena::StepArena(MemoryResource& resource, Ledger& ledger)
    : impl_(std::make_unique<Impl>(resource, ledger)), self_(std::make_shared<StepArena*>(this)) {}

StepArena::~StepArena() {
  *self_ = nullptr;
  for (std::size_t slot = 0; slot < impl_->held.size(); ++slot) {
    if (impl_->held[slot].source != Source::none) give_back(static_cast<std::int64_t>(slot), {});
  }
  impl_->free_block();
}

void StepArena::begin(std::string_view program, bool record, const Shape& shape) {
  Impl& arena = *impl_;
  if (arena.mode != Mode::idle) {
    throw LogicError(
        fmt::format("step arena: pass '{}' begins inside pass '{}'", program, arena.program->name));
  }
  Program* found = arena.find(program);
  if (found == nullptr) {
    arena.programs.push_back(std::make_unique<Program>());
    found = arena.programs.back().get();
    found->name = program;
  }
  std::shared_ptr<Plan> plan = record ? nullptr : arena.plan_for(*found, shape);
  if (plan) arena.fit_block();
  const bool replay = plan && plan->block_bytes <= arena.block.bytes();
  const bool watch = record || !found->known.empty();
  // The buffers of a pass that is not replayed come from the resource. The block, even one made for another
  // program, would only add to the memory held.
  if (!replay && arena.occupied.empty()) arena.free_block();
  arena.program = found;
  arena.plan = replay ? std::move(plan) : nullptr;
  arena.shapes.assign(1, shape);
  arena.mode = replay ? Mode::planned : watch ? Mode::recording : Mode::dynamic;
  ++arena.pass;
  arena.next_slot = 0;
  arena.instant = 0;
  arena.recorded.clear();
}

void StepArena::also(const Shape& shape) {
  Impl& arena = *impl_;
  if (arena.mode == Mode::idle) throw LogicError("step arena: also() outside a pass");
  arena.shapes.push_back(shape);
  if (arena.mode != Mode::planned || within(shape, *arena.plan, arena.shapes.size() - 1)) return;
  arena.mode = Mode::fallen_back;
  if (arena.occupied.empty()) arena.free_block();
}

void StepArena::end() {
  Impl& arena = *impl_;
  if (arena.mode == Mode::idle) throw LogicError("step arena: end() without begin()");
  const std::int64_t pass = arena.pass;
  const auto outstanding = std::count_if(arena.held.begin(), arena.held.end(), [&](const Held& entry) {
    return entry.source != Source::none && entry.pass == pass;
  });
  if (outstanding > 0) {
    throw LogicError(
        fmt::format("step arena: pass '{}' ends while {} of its buffers are held: {}; release them first",
                    arena.program->name, outstanding, arena.holders(pass)));
  }
  const bool recorded = arena.mode == Mode::recording || arena.mode == Mode::fallen_back;
  if (arena.mode != Mode::dynamic) arena.remember(recorded ? arena.plan_recorded() : arena.plan);
  arena.mode = Mode::idle;
  arena.program = nullptr;
  arena.plan.reset();
  if (recorded) arena.fit_block();
}

void StepArena::abandon() noexcept {
  impl_->mode = Mode::idle;
  impl_->program = nullptr;
  impl_->plan.reset();
  impl_->recorded.clear();
}

bool StepArena::active() const noexcept {
  return impl_->mode != Mode::idle;
}

StepBuffer StepArena::acquire(std::int64_t bytes, Category category, std::string_view tag) {
  Impl& arena = *impl_;
  if (bytes < 0) throw InvalidArgument(fmt::format("step buffer '{}' of {} bytes", tag, bytes));
  StepBuffer buffer;
  std::optional<std::int64_t> offset;
  if (arena.mode == Mode::planned) {
    offset = arena.planned_offset(bytes, category);
    if (!offset) arena.mode = Mode::fallen_back;
  }
  const std::int64_t index = arena.new_entry();
  Held& entry = arena.held[static_cast<std::size_t>(index)];
  try {
    entry.bytes = bytes;
    entry.category = category;
    entry.tag = tag;
    entry.pass = arena.mode == Mode::idle ? -1 : arena.pass;
    entry.recorded_as = -1;
    if (arena.mode != Mode::idle && arena.mode != Mode::dynamic) {
      entry.recorded_as = static_cast<std::int64_t>(arena.recorded.size());
      arena.recorded.push_back({bytes, category, {arena.instant, arena.instant, bytes}, 0, 0});
    }
    if (bytes == 0) {
      entry.data = arena.nothing;
      entry.source = Source::empty;
    } else if (offset) {
      const std::int64_t end = *offset + aligned_bytes(bytes);
      arena.collect_ready(*offset, end, buffer.ready_);
      arena.occupied.emplace(*offset, end);
      arena.ledger.occupied(arena.tier, category, aligned_bytes(bytes), tag);
      entry.offset = *offset;
      entry.data = static_cast<std::byte*>(arena.block.data()) + *offset;
      entry.source = Source::block;
    } else {
      entry.data = arena.resource.allocate({bytes, category, tag});
      entry.source = Source::resource;
      arena.ledger.assigned_to_step(arena.tier, category, aligned_bytes(bytes));
    }
  } catch (...) {
    if (entry.recorded_as >= 0) arena.recorded.pop_back();
    entry.source = Source::none;
    arena.free_entries.push_back(index);
    throw;
  }
  ++arena.instant;
  if (arena.poison && bytes > 0) {
    for (const Event& event : buffer.ready_) wait_quietly(event);
    arena.poison(entry.data, bytes);
  }
  buffer.arena_ = self_;
  buffer.data_ = entry.data;
  buffer.bytes_ = bytes;
  buffer.slot_ = index;
  return buffer;
}

void StepArena::give_back(std::int64_t slot_number, const Event& after) noexcept {
  Impl& arena = *impl_;
  Held& entry = arena.held[static_cast<std::size_t>(slot_number)];
  const std::int64_t aligned = aligned_bytes(entry.bytes);
  if (arena.poison && entry.bytes > 0) {
    wait_quietly(after);
    arena.poison(entry.data, entry.bytes);
  }
  if (entry.source == Source::block) {
    arena.occupied.erase(entry.offset);
    arena.ledger.vacated(arena.tier, entry.category, aligned, entry.tag);
    if (!after.query()) arena.pending.push_back({entry.offset, entry.offset + aligned, after});
  } else if (entry.source == Source::resource) {
    // Blocking here makes the peak of an unplanned pass independent of timing.
    wait_quietly(after);
    arena.ledger.assigned_to_step(arena.tier, entry.category, -aligned);
    arena.resource.deallocate(entry.data, {entry.bytes, entry.category, entry.tag});
  }
  if (entry.recorded_as >= 0 && entry.pass == arena.pass && arena.mode != Mode::idle) {
    PlannedSlot& slot = arena.recorded[static_cast<std::size_t>(entry.recorded_as)];
    slot.interval.end = arena.instant;
    slot.released_at = static_cast<std::int64_t>(arena.recorded.size());
  }
  ++arena.instant;
  entry.source = Source::none;
  arena.free_entries.push_back(slot_number);
}

bool StepArena::planned(std::string_view program) const {
  const Program* found = impl_->find(program);
  return found != nullptr && !found->known.empty() &&
         found->known.front().plan->block_bytes <= impl_->block.bytes();
}

std::int64_t StepArena::packings() const noexcept {
  return impl_->packings;
}

std::int64_t StepArena::dropped() const noexcept {
  return impl_->dropped;
}

void StepArena::forget() {
  Impl& arena = *impl_;
  if (arena.mode != Mode::idle) {
    throw LogicError(fmt::format("step arena: forget() inside pass '{}'", arena.program->name));
  }
  if (!arena.occupied.empty()) {
    throw LogicError(fmt::format("step arena: forget() while buffers are held: {}", arena.holders(-1)));
  }
  arena.free_block();
  arena.programs.clear();
}

std::int64_t StepArena::block_bytes() const noexcept {
  return impl_->block.bytes();
}

std::int64_t StepArena::live_peak(std::string_view program) const {
  const Program* found = impl_->find(program);
  std::int64_t peak = 0;
  if (found == nullptr) return peak;
  for (const KnownShape& known : found->known) peak = std::max(peak, known.plan->live_peak);
  return peak;
}

void StepArena::set_poison(bool poison) noexcept {
  if (!poison) {
    impl_->poison = nullptr;
    return;
  }
  impl_->poison = [](void* pointer, std::int64_t bytes) {
    std::memset(pointer, poison_byte, static_cast<std::size_t>(bytes));
  };
}

void StepArena::poison_with(PoisonFill fill) noexcept {
  impl_->poison = std::move(fill);
}

}  // namespace tranche
