#include "tranche/device/memory_timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <new>
#include <tuple>
#include <unordered_map>

#include "core/clock.h"
#include "tranche/core/error.h"

namespace tranche {

using detail::seconds_now;

namespace {

std::size_t index_of(Tier tier) {
  return static_cast<std::size_t>(tier);
}

/// Indices of texts. Index 0 is the empty text, and stands for texts beyond the limit or the available heap.
class Texts {
 public:
  explicit Texts(std::size_t limit) : limit_(limit) { texts_.emplace_back(); }

  std::uint32_t number_of(std::string_view text) noexcept {
    if (text.empty()) return 0;
    if (const auto found = numbers_.find(text); found != numbers_.end()) return found->second;
    if (texts_.size() >= limit_) return 0;
    try {
      const auto number = static_cast<std::uint32_t>(texts_.size());
      texts_.emplace_back(text);
      numbers_.emplace(texts_.back(), number);
      bytes_ += static_cast<std::int64_t>(text.size() + 2 * sizeof(std::string) + 32);
      return number;
    } catch (const std::bad_alloc&) {
      return 0;
    }
  }
  std::vector<std::string> all() const { return {texts_.begin(), texts_.end()}; }
  std::size_t size() const { return texts_.size(); }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::size_t limit_;
  std::deque<std::string> texts_;  // addresses stay valid
  std::unordered_map<std::string_view, std::uint32_t> numbers_;
  std::int64_t bytes_ = 0;
};

constexpr std::size_t most_tags = std::size_t{1} << 16;
constexpr std::size_t most_units = std::numeric_limits<std::uint16_t>::max();
constexpr std::size_t most_phases = 256;

// Every timeline gives the first index to the tag of an arena's block.
constexpr std::uint32_t block_tag = 1;

bool counts(MemoryEvent::Kind kind) {
  return kind != MemoryEvent::Kind::phase && kind != MemoryEvent::Kind::step;
}

}  // namespace

void apply(const MemoryEvent& event, MemoryState& state) {
  const bool block = event.tag == block_tag;
  CategoryBytes& current = state.current[index_of(event.tier)];
  std::int64_t& free = state.block_free[index_of(event.tier)];
  switch (event.kind) {
    case MemoryEvent::Kind::allocated:
      current[event.category] += event.bytes;
      if (block) free += event.bytes;
      break;
    case MemoryEvent::Kind::released:
      current[event.category] -= event.bytes;
      if (block) free -= event.bytes;
      break;
    case MemoryEvent::Kind::occupied:
      current[Category::other] -= event.bytes;
      current[event.category] += event.bytes;
      free -= event.bytes;
      break;
    case MemoryEvent::Kind::vacated:
      current[event.category] -= event.bytes;
      current[Category::other] += event.bytes;
      free += event.bytes;
      break;
    case MemoryEvent::Kind::phase:
      state.phase = event.phase;
      state.unit = event.unit;
      break;
    case MemoryEvent::Kind::step:
      state.step = event.bytes + 1;
      break;
  }
}

// ---- the record

std::int64_t MemoryRecord::events() const {
  return static_cast<std::int64_t>(first.size() + latest.size()) + dropped;
}

void MemoryRecord::replay(
    const std::function<void(const MemoryEvent&, std::int64_t, const MemoryState&)>& visit) const {
  MemoryState state = start;
  std::int64_t number = 0;
  for (const MemoryEvent& event : first) {
    apply(event, state);
    visit(event, number++, state);
  }
  if (dropped > 0) state = resumed;
  number += dropped;
  for (const MemoryEvent& event : latest) {
    apply(event, state);
    visit(event, number++, state);
  }
}

std::vector<BornItem> MemoryRecord::live_behind(Tier tier, std::int64_t number) const {
  if (dropped > 0 && number >= static_cast<std::int64_t>(first.size())) return {};
  if (number >= events()) return {};
  struct Birth {
    std::uint16_t phase, unit;
    bool operator<(const Birth& other) const {
      return std::tie(phase, unit) < std::tie(other.phase, other.unit);
    }
  };
  using Key = std::tuple<std::string, Category, std::int64_t>;
  std::map<Key, std::vector<Birth>> alive;
  std::int64_t block_free = start.block_free[index_of(tier)];
  for (const LiveItem& item : live_at_start[index_of(tier)]) {
    if (item.tag == step_arena_tag) continue;
    alive[{item.tag, item.category, item.bytes}].push_back({start.phase, start.unit});
  }
  MemoryState state = start;
  const auto walk = [&](const MemoryEvent& event) {
    apply(event, state);
    if (!counts(event.kind) || event.tier != tier) return;
    block_free = state.block_free[index_of(tier)];
    if (event.tag == block_tag) return;
    auto& births = alive[{tags[event.tag], event.category, event.bytes}];
    const bool came = event.kind == MemoryEvent::Kind::allocated || event.kind == MemoryEvent::Kind::occupied;
    if (came) {
      births.push_back({event.phase, event.unit});
    } else if (!births.empty()) {
      births.pop_back();
    }
  };
  std::int64_t at = 0;
  for (const std::vector<MemoryEvent>* part : {&first, &latest}) {
    for (const MemoryEvent& event : *part) {
      if (at++ > number) break;
      walk(event);
    }
  }
  std::vector<BornItem> items;
  for (const auto& [key, births] : alive) {
    std::map<Birth, std::int64_t> same;
    for (const Birth& birth : births) ++same[birth];
    for (const auto& [birth, count] : same) {
      items.push_back({std::get<0>(key), phases[birth.phase], units[birth.unit], std::get<1>(key),
                       std::get<2>(key), count});
    }
  }
  if (block_free > 0) {
    items.push_back({std::string(step_arena_tag) + ", free", {}, {}, Category::other, block_free, 1});
  }
  // The unit in a tag takes precedence over the current unit, because units are also prefetched.
  for (BornItem& item : items) {
    std::size_t longest = 0;
    for (const std::string& unit : units) {
      const bool named = unit.size() > longest && item.tag.size() > unit.size() &&
                         item.tag.compare(0, unit.size(), unit) == 0 && item.tag[unit.size()] == ' ';
      if (!named) continue;
      longest = unit.size();
      item.unit = unit;
    }
  }
  std::sort(items.begin(), items.end(), [](const BornItem& a, const BornItem& b) {
    return std::tuple(-a.bytes * a.count, a.tag, a.unit) < std::tuple(-b.bytes * b.count, b.tag, b.unit);
  });
  return items;
}

// ---- the timeline

struct MemoryTimeline::Impl {
  explicit Impl(std::int64_t events) : tags(most_tags), phases(most_phases), units(most_units) {
    if (events < 1) {
      throw InvalidArgument(fmt::format("a memory timeline of {} events; give it at least one", events));
    }
    tags.number_of(step_arena_tag);
    capacity = static_cast<std::size_t>(events);
    first.reserve(capacity);
    latest.reserve(capacity);
    by_phase.resize(most_phases);
  }

  mutable std::mutex mutex;
  Texts tags, phases, units;
  std::size_t capacity = 0;
  std::vector<MemoryEvent> first;
  std::vector<MemoryEvent> latest;  // a ring buffer
  std::size_t oldest = 0;
  std::int64_t dropped = 0;
  MemoryState start, now, resumed;
  std::array<std::vector<LiveItem>, tier_count> live_at_start;
  double began = 0;
  std::array<MemoryRecord::Peak, tier_count> peaks;
  std::vector<MemoryRecord::PhasePeak> by_phase;

  std::int64_t count() const { return static_cast<std::int64_t>(first.size() + latest.size()) + dropped; }

  void note(const MemoryEvent& event) {
    apply(event, now);
    if (first.size() < capacity) {
      first.push_back(event);
      if (first.size() == capacity) resumed = now;
      return;
    }
    if (latest.size() == capacity) {
      apply(latest[oldest], resumed);
      latest[oldest] = event;
      oldest = oldest + 1 == capacity ? 0 : oldest + 1;
      ++dropped;
      return;
    }
    latest.push_back(event);
  }

  void note_phase_peak(Tier tier) {
    MemoryRecord::PhasePeak& highest = by_phase[now.phase];
    const std::size_t t = index_of(tier);
    for (const Category category : all_categories) {
      highest.categories[t][category] = std::max(highest.categories[t][category], now.current[t][category]);
    }
    highest.total[t] = std::max(highest.total[t], now.total(tier));
  }

  // Follows the ledger: the highest total, and among several such instants the first with the least `other`.
  void note_peak(Tier tier, double seconds) {
    MemoryRecord::Peak& peak = peaks[index_of(tier)];
    const CategoryBytes& current = now.current[index_of(tier)];
    const std::int64_t total = current.total();
    const bool clearer = total == peak.bytes && current[Category::other] < peak.categories[Category::other];
    if (total <= peak.bytes && !clearer) return;
    const std::int64_t free = now.block_free[index_of(tier)];
    peak = {total, current, free, seconds, now.phase, now.unit, now.step, count() - 1};
  }
};

MemoryTimeline::MemoryTimeline(Ledger& ledger, const MemoryTimelineOptions& options)
    : ledger_(ledger), impl_(std::make_unique<Impl>(options.events)) {
  ledger_.observe(this);
}

MemoryTimeline::~MemoryTimeline() {
  ledger_.observe(nullptr);
}

void MemoryTimeline::attached(const LedgerState& state) {
  Impl& impl = *impl_;
  std::lock_guard lock(impl.mutex);
  impl.began = seconds_now();
  impl.start.current = state.current;
  impl.start.phase = static_cast<std::uint16_t>(impl.phases.number_of(state.phase));
  impl.start.unit = static_cast<std::uint16_t>(impl.units.number_of(state.unit));
  impl.live_at_start = state.live;
  for (const Tier tier : all_tiers) {
    for (const LiveItem& item : state.live[index_of(tier)]) {
      if (item.tag == step_arena_tag) impl.start.block_free[index_of(tier)] += item.bytes;
    }
  }
  impl.now = impl.start;
  impl.resumed = impl.start;
  for (const Tier tier : all_tiers) {
    impl.note_peak(tier, impl.began);
    impl.note_phase_peak(tier);
  }
}

void MemoryTimeline::changed(const LedgerChange& change) noexcept {
  Impl& impl = *impl_;
  std::lock_guard lock(impl.mutex);
  MemoryEvent event;
  event.seconds = seconds_now();
  event.bytes = change.bytes;
  event.tag = impl.tags.number_of(change.tag);
  event.phase = impl.now.phase;
  event.unit = impl.now.unit;
  event.kind = static_cast<MemoryEvent::Kind>(change.kind);
  event.tier = change.tier;
  event.category = change.category;
  impl.note(event);
  impl.note_phase_peak(change.tier);
  // An event that frees memory lowers the total or raises `other`, so it cannot set a peak.
  if (change.kind == LedgerChange::Kind::allocated || change.kind == LedgerChange::Kind::occupied) {
    impl.note_peak(change.tier, event.seconds);
  }
}

void MemoryTimeline::phase_changed(std::string_view phase, std::string_view unit) noexcept {
  Impl& impl = *impl_;
  std::lock_guard lock(impl.mutex);
  MemoryEvent event;
  event.seconds = seconds_now();
  event.phase = static_cast<std::uint16_t>(impl.phases.number_of(phase));
  event.unit = static_cast<std::uint16_t>(impl.units.number_of(unit));
  event.kind = MemoryEvent::Kind::phase;
  const bool another = event.phase != impl.now.phase;
  if (!another && event.unit == impl.now.unit) return;
  impl.note(event);
  if (!another) return;
  for (const Tier tier : all_tiers) impl.note_phase_peak(tier);
}

void MemoryTimeline::end_step(std::int64_t step) {
  Impl& impl = *impl_;
  std::lock_guard lock(impl.mutex);
  MemoryEvent event;
  event.seconds = seconds_now();
  event.bytes = step;
  event.phase = impl.now.phase;
  event.unit = impl.now.unit;
  event.kind = MemoryEvent::Kind::step;
  impl.note(event);
}

MemoryRecord MemoryTimeline::record() const {
  const Impl& impl = *impl_;
  std::lock_guard lock(impl.mutex);
  MemoryRecord result;
  result.tags = impl.tags.all();
  result.phases = impl.phases.all();
  result.units = impl.units.all();
  result.start = impl.start;
  result.live_at_start = impl.live_at_start;
  result.began = impl.began;
  result.ended = seconds_now();
  result.first = impl.first;
  result.dropped = impl.dropped;
  result.resumed = impl.resumed;
  result.latest.reserve(impl.latest.size());
  for (std::size_t i = 0; i < impl.latest.size(); ++i) {
    result.latest.push_back(impl.latest[(impl.oldest + i) % impl.capacity]);
  }
  result.peaks = impl.peaks;
  result.by_phase.assign(impl.by_phase.begin(),
                         impl.by_phase.begin() + static_cast<std::ptrdiff_t>(impl.phases.size()));
  return result;
}

std::int64_t MemoryTimeline::own_bytes() const {
  const Impl& impl = *impl_;
  std::lock_guard lock(impl.mutex);
  // Pages of the heap that were never written occupy no memory.
  const auto events =
      static_cast<std::int64_t>((impl.first.size() + impl.latest.size()) * sizeof(MemoryEvent));
  const auto peaks = static_cast<std::int64_t>(impl.by_phase.size() * sizeof(MemoryRecord::PhasePeak));
  return events + peaks + impl.tags.bytes() + impl.phases.bytes() + impl.units.bytes();
}

}  // namespace tranche
