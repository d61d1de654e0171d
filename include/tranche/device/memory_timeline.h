#pragma once
/// The timeline of a ledger: every change of its accounts with time, phase, unit at work and step.

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tranche/device/ledger.h"

namespace tranche {

/// One entry. Texts are numbers into MemoryRecord's lists.
struct MemoryEvent {
  enum class Kind : std::uint8_t { allocated, released, occupied, vacated, phase, step };
  double seconds = 0;      ///< of seconds_now()
  std::int64_t bytes = 0;  ///< that came or went; of `step` the number of the step that has ended
  std::uint32_t tag = 0;
  std::uint16_t phase = 0, unit = 0;  ///< at work; of `phase` those that begin
  Kind kind = Kind::allocated;
  Tier tier = Tier::device;
  Category category = Category::other;
};

/// The memory held at an instant.
struct MemoryState {
  std::array<CategoryBytes, tier_count> current;
  /// Bytes of step arenas' blocks that no slot occupies; part of `other`.
  std::array<std::int64_t, tier_count> block_free{};
  std::uint16_t phase = 0, unit = 0;
  std::int64_t step = 1;  ///< under way, or next
  std::int64_t total(Tier tier) const { return current[static_cast<std::size_t>(tier)].total(); }
};

/// An item that is alive at some instant, with where it was born.
struct BornItem {
  std::string tag, phase, unit;
  Category category = Category::other;
  std::int64_t bytes = 0;
  std::int64_t count = 1;  ///< equal ones; `bytes` is of one
};

/// A copy of what a timeline has recorded.
struct MemoryRecord {
  std::vector<std::string> tags, phases, units;  ///< by number; number 0 is the empty text
  MemoryState start;
  std::array<std::vector<LiveItem>, tier_count> live_at_start;
  double began = 0, ended = 0;     ///< seconds_now() of the attachment and of this copy
  std::vector<MemoryEvent> first;  ///< from the start on
  std::int64_t dropped = 0;        ///< events after them of which only the sum is known:
  MemoryState resumed;             ///< memory held behind them (behind `first` when there are none)
  std::vector<MemoryEvent> latest;

  /// The highest total of a tier: the instant that the ledger calls the peak, as far as it came after the
  /// start.
  struct Peak {
    std::int64_t bytes = 0;
    CategoryBytes categories;
    std::int64_t block_free = 0;  ///< of `other`, as in MemoryState
    double seconds = 0;
    std::uint16_t phase = 0, unit = 0;
    std::int64_t step = 0;
    std::int64_t event = -1;  ///< number, counted from the start; -1: the start itself
  };
  std::array<Peak, tier_count> peaks;
  /// By phase and tier: the highest value that each category had while the phase lasted, and the total.
  struct PhasePeak {
    std::array<CategoryBytes, tier_count> categories;
    std::array<std::int64_t, tier_count> total{};
  };
  std::vector<PhasePeak> by_phase;  ///< by number of the phase

  std::int64_t events() const;  ///< that happened, dropped ones included
  /// Calls visit(event, number, state behind it) in order; before the first of `latest` the state jumps over
  /// what was dropped.
  void replay(
      const std::function<void(const MemoryEvent&, std::int64_t number, const MemoryState&)>& visit) const;
  /// The items alive behind event `number` (-1: at the start), largest first; equal ones are one entry. Of
  /// equal items the youngest is taken to go first. Of the dropped ones, and those behind, what is alive is
  /// not known: empty.
  std::vector<BornItem> live_behind(Tier tier, std::int64_t number) const;
};

/// Changes `state` as the event says.
void apply(const MemoryEvent& event, MemoryState& state);

struct MemoryTimelineOptions {
  /// Events kept from the start, and as many of the latest; those between are summed up. 32 bytes each, taken
  /// at once from the heap, where no ledger counts them.
  std::int64_t events = std::int64_t{1} << 16;
};

/// Records a ledger from its making to its end. Changes nothing of what it watches: it takes no memory from
/// any MemoryResource, and what it keeps is bounded. An event costs some ten nanoseconds. Thread-safe.
class MemoryTimeline : private LedgerObserver {
 public:
  /// Throws LogicError when another one watches the ledger, which outlives this.
  explicit MemoryTimeline(Ledger& ledger, const MemoryTimelineOptions& options = {});
  ~MemoryTimeline() override;
  MemoryTimeline(const MemoryTimeline&) = delete;
  MemoryTimeline& operator=(const MemoryTimeline&) = delete;

  /// Marks the end of a step.
  void end_step(std::int64_t step);
  MemoryRecord record() const;
  /// Bytes that the timeline itself has taken.
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
