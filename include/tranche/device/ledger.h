#pragma once
/// The ledger: the account of bytes of one rank by tier, category and phase.

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

/// Bytes by category.
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

/// Tag under which a step arena takes its block.
inline constexpr std::string_view step_arena_tag = "step arena";

/// One live allocation or arena slot, for "who was alive at the peak".
struct LiveItem {
  std::string tag;
  Category category = Category::other;
  std::int64_t bytes = 0;
};

/// Account of one tier. `total` counts what is held from the memory resource. Memory inside an arena is
/// attributed to the category of the slot that occupies it; what the arena holds but no slot occupies is
/// counted as `other`, so the categories of `current` always add up to its total.
struct TierAccount {
  CategoryBytes current;        ///< now, persistent and step memory
  CategoryBytes persistent;     ///< now, allocations that outlive a step (outside the arena)
  CategoryBytes category_peak;  ///< each category's own highest value
  /// The categories at the instant of the highest total; of several such instants (an arena's block keeps the
  /// total level while slots come and go) the first of those with the least `other`.
  CategoryBytes at_peak;
  std::int64_t peak = 0;               ///< highest total
  std::string peak_phase;              ///< phase in which it occurred
  std::vector<LiveItem> live_at_peak;  ///< largest first; the bytes add up to `peak`
};

/// One change of a ledger's accounting, as its observer gets it.
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
  std::array<std::vector<LiveItem>, tier_count> live;  ///< an arena's block counts what no slot occupies
  std::string_view phase, unit;
};

/// Gets every change in order, under the ledger's lock: must be quick and must not call the ledger.
class LedgerObserver {
 public:
  virtual ~LedgerObserver() = default;
  virtual void attached(const LedgerState& state) = 0;
  virtual void changed(const LedgerChange& change) noexcept = 0;
  virtual void phase_changed(std::string_view phase, std::string_view unit) noexcept = 0;
};

/// Thread-safe. Phase changes come from the issuing thread.
class Ledger {
 public:
  Ledger();
  ~Ledger();
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  void allocated(Tier tier, Category category, std::int64_t bytes, std::string_view tag);
  void released(Tier tier, Category category, std::int64_t bytes, std::string_view tag) noexcept;
  /// An arena slot starts or stops occupying `bytes` of memory that is already held as `other`.
  void occupied(Tier tier, Category category, std::int64_t bytes, std::string_view tag);
  void vacated(Tier tier, Category category, std::int64_t bytes, std::string_view tag) noexcept;
  /// Says that `bytes` of what allocated() counted are the step's (an arena's block, a buffer of an unplanned
  /// pass) and so leave `persistent`; called with -bytes just before they are released.
  void assigned_to_step(Tier tier, Category category, std::int64_t bytes) noexcept;

  /// Names what the rank is doing ("forward", "backward", "reduce", "step", "save") and the unit at work.
  void set_phase(std::string_view phase, std::string_view unit = {});
  /// Calls `mark` at each set_phase() from now on, on its thread (Device::mark_phase()).
  void mark_phases(std::function<void(std::string_view phase, std::string_view unit)> mark);
  /// The current activity, for people: "backward of h.3", "step"; empty before the first set_phase().
  std::string doing() const;
  TierAccount account(Tier tier) const;
  /// Bytes held now.
  std::int64_t total(Tier tier) const;
  /// Gives `observer` (not owned; nullptr: none) the present state, and from then on every change. LogicError
  /// when there is another one.
  void observe(LedgerObserver* observer);
  /// Forgets peaks; `current` becomes the peak.
  void reset_peaks();
  /// Table for people: category, current, at peak; by tier that holds anything.
  std::string table() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// "1.50 GiB", "12 B"; for tables and errors.
std::string format_bytes(std::int64_t bytes);

}  // namespace tranche
