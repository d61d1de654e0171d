#pragma once
/// The ledger: the accounting of one rank's bytes by tier, category and phase.

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/device/memory.h"

namespace tranche {

/// Bytes of each category.
struct CategoryBytes {
  std::array<std::int64_t, category_count> bytes{};
  std::int64_t& operator[](Category c) { return bytes[static_cast<std::size_t>(c)]; }
  std::int64_t operator[](Category c) const { return bytes[static_cast<std::size_t>(c)]; }
  std::int64_t total() const {
    std::int64_t sum = 0;
    for (auto b : bytes) sum += b;
    return sum;
  }
};

/// The tag of a step arena's block.
inline constexpr std::string_view step_arena_tag = "step arena";

/// One live allocation or arena slot, for the list of live items at the peak.
struct LiveItem {
  std::string tag;
  Category category = Category::other;
  std::int64_t bytes = 0;
};

/// The account of one tier. `total` counts the bytes held from the memory resource. Memory inside an arena is
/// attributed to the category of the slot that occupies it; arena memory without a slot counts as `other`, so
/// the categories of `current` always add up to its total.
struct TierAccount {
  CategoryBytes current;        ///< now, persistent and step memory
  CategoryBytes persistent;     ///< now, allocations that outlive a step (outside the arena)
  CategoryBytes category_peak;  ///< each category's own highest value
  /// The categories at the instant of the highest total. Several instants may have that total (an arena's
  /// block keeps it constant while slots come and go); this is the first of those with the least `other`.
  CategoryBytes at_peak;
  std::int64_t peak = 0;               ///< highest total
  std::string peak_phase;              ///< phase in which it occurred
  std::vector<LiveItem> live_at_peak;  ///< largest first; the bytes add up to `peak`
};

/// One change of a ledger's accounting, for its observer.
struct LedgerChange {
  enum class Kind : std::uint8_t { allocated, released, occupied, vacated };
  Kind kind = Kind::allocated;
  Tier tier = Tier::device;
  Category category = Category::other;
  std::int64_t bytes = 0;
  std::string_view tag;
};

/// The state of a ledger when an observer is attached.
struct LedgerState {
  std::array<CategoryBytes, tier_count> current;
  std::array<std::vector<LiveItem>, tier_count> live;  ///< arena memory without a slot is listed as its block
  std::string_view phase, unit;
};

/// Receives every change in order, under the ledger's lock. It must be quick and must not call the ledger.
class LedgerObserver {
 public:
  virtual ~LedgerObserver() = default;
  virtual void attached(const LedgerState& state) = 0;
  virtual void changed(const LedgerChange& change) noexcept = 0;
  virtual void phase_changed(std::string_view phase, std::string_view unit) noexcept = 0;
};

/// Thread-safe. The issuing thread changes the phase.
class Ledger {
 public:
  Ledger();
  ~Ledger();
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  void allocated(Tier tier, Category category, std::int64_t bytes, std::string_view tag);
  void released(Tier tier, Category category, std::int64_t bytes, std::string_view tag) noexcept;
  /// An arena slot starts or stops occupying `bytes` of memory that are already counted as `other`.
  void occupied(Tier tier, Category category, std::int64_t bytes, std::string_view tag);
  void vacated(Tier tier, Category category, std::int64_t bytes, std::string_view tag) noexcept;
  /// Marks `bytes` that allocated() counted as belonging to the step (an arena's block, a buffer of an
  /// unplanned pass), so that they leave `persistent`; called with -bytes just before they are released.
  void assigned_to_step(Tier tier, Category category, std::int64_t bytes) noexcept;

  /// Names the rank's current phase ("forward", "backward", "reduce", "step", "save") and unit.
  void set_phase(std::string_view phase, std::string_view unit = {});
  /// Registers `mark`, which each later set_phase() calls on its thread (Device::mark_phase()).
  void mark_phases(std::function<void(std::string_view phase, std::string_view unit)> mark);
  /// The current activity, for people: "backward of h.3", "step"; empty before the first set_phase().
  std::string doing() const;
  TierAccount account(Tier tier) const;
  /// The bytes held now.
  std::int64_t total(Tier tier) const;
  /// Gives `observer` (not owned; nullptr: none) the present state, and from then on every change. Throws
  /// LogicError when another observer is attached.
  void observe(LedgerObserver* observer);
  /// Forgets peaks; `current` becomes the peak.
  void reset_peaks();
  /// A table for people: category, current, at peak; one part for each tier that holds anything.
  std::string table() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// "1.50 GiB", "12 B"; for tables and errors.
std::string format_bytes(std::int64_t bytes);

}  // namespace tranche
