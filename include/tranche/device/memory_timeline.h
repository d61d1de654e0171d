#pragma once
/// The timeline of a ledger: every change of its accounts with time, phase, unit and step.

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tranche/device/ledger.h"

namespace tranche {

/// One entry. Texts are stored as indices into MemoryRecord's lists.
struct MemoryEvent {
  enum class Kind : std::uint8_t { allocated, released, occupied, vacated, phase, step };
  double seconds = 0;      ///< from seconds_now()
  std::int64_t bytes = 0;  ///< allocated or freed; for `step`, the number of the step that has ended
  std::uint32_t tag = 0;
  std::uint16_t phase = 0, unit = 0;  ///< the current ones; for `phase`, those that begin
  Kind kind = Kind::allocated;
  Tier tier = Tier::device;
  Category category = Category::other;
};

/// The memory held at an instant.
struct MemoryState {
  std::array<CategoryBytes, tier_count> current;
  /// Bytes of step arenas' blocks without a slot; part of `other`.
  std::array<std::int64_t, tier_count> block_free{};
  std::uint16_t phase = 0, unit = 0;
  std::int64_t step = 1;  ///< the current step, or the next one
  std::int64_t total(Tier tier) const { return current[static_cast<std::size_t>(tier)].total(); }
};

/// An item that is alive at some instant, with the phase and unit in which it was allocated.
struct BornItem {
  std::string tag, phase, unit;
  Category category = Category::other;
  std::int64_t bytes = 0;
  std::int64_t count = 1;  ///< the number of equal items; `bytes` is of one
};

/// A copy of what a timeline has recorded.
struct MemoryRecord {
  std::vector<std::string> tags, phases, units;  ///< by index; index 0 is the empty text
  MemoryState start;
  std::array<std::vector<LiveItem>, tier_count> live_at_start;
  double began = 0, ended = 0;     ///< seconds_now() at the attachment and at this copy
  std::vector<MemoryEvent> first;  ///< the first events
  std::int64_t dropped = 0;        ///< events after them of which only the sum is known
  MemoryState resumed;             ///< memory held after them (after `first` when none were dropped)
  std::vector<MemoryEvent> latest;

  /// The highest total of a tier, at the instant that the ledger calls the peak, if it came after the start.
  struct Peak {
    std::int64_t bytes = 0;
    CategoryBytes categories;
    std::int64_t block_free = 0;  ///< part of `other`, as in MemoryState
    double seconds = 0;
    std::uint16_t phase = 0, unit = 0;
    std::int64_t step = 0;
    std::int64_t event = -1;  ///< index, counted from the start; -1: the start itself
  };
  std::array<Peak, tier_count> peaks;
  /// The highest value of each category during a phase, and of the total, by tier.
  struct PhasePeak {
    std::array<CategoryBytes, tier_count> categories;
    std::array<std::int64_t, tier_count> total{};
  };
  std::vector<PhasePeak> by_phase;  ///< by index of the phase

  std::int64_t events() const;  ///< all events, including dropped ones
  /// Calls visit(event, index, state after it) in order. Before the first event of `latest`, the state jumps
  /// over the dropped events.
  void replay(
      const std::function<void(const MemoryEvent&, std::int64_t number, const MemoryState&)>& visit) const;
  /// The items alive after event `number` (-1: at the start), largest first; equal items are one entry. Among
  /// equal items the youngest is assumed to be freed first. For dropped events and all later ones the items
  /// are unknown: the list is empty.
  std::vector<BornItem> live_behind(Tier tier, std::int64_t number) const;
};

/// Applies the event to `state`.
void apply(const MemoryEvent& event, MemoryState& state);

struct MemoryTimelineOptions {
  /// The number of events kept from the start, and of the latest; those between are summed up. An event takes
  /// 32 bytes; all are allocated at once from the heap, where no ledger counts them.
  std::int64_t events = std::int64_t{1} << 16;
};

/// Records a ledger from this object's construction to its destruction. It does not influence the ledger: it
/// takes no memory from any MemoryResource, and the record is bounded. An event costs some ten nanoseconds.
/// Thread-safe.
class MemoryTimeline : private LedgerObserver {
 public:
  /// Throws LogicError when another observer is attached to the ledger. The ledger must outlive this object.
  explicit MemoryTimeline(Ledger& ledger, const MemoryTimelineOptions& options = {});
  ~MemoryTimeline() override;
  MemoryTimeline(const MemoryTimeline&) = delete;
  MemoryTimeline& operator=(const MemoryTimeline&) = delete;

  /// Marks the end of a step.
  void end_step(std::int64_t step);
  MemoryRecord record() const;
  /// The bytes that the timeline itself occupies.
  std::int64_t own_bytes() const;

 private:
  void attached(const LedgerState& state) override;
  void changed(const LedgerChange& change) noexcept override;
  void phase_changed(std::string_view phase, std::string_view unit) noexcept override;
  struct Impl;
  Ledger& ledger_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche
