#include "tranche/device/ledger.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>

#include "tranche/core/error.h"

namespace tranche {
namespace {

struct ItemKey {
  std::string_view tag;  // refers to the item's own string
  Category category;
  std::int64_t bytes;
  bool operator==(const ItemKey&) const = default;
};

struct ItemKeyHash {
  std::size_t operator()(const ItemKey& key) const noexcept {
    const std::size_t mixed =
        static_cast<std::size_t>(key.bytes) * 31 + static_cast<std::size_t>(key.category);
    return std::hash<std::string_view>{}(key.tag) ^ (mixed * 0x9e3779b97f4a7c15ull);
  }
};

/// Equal live items are one entry with a count. Tags are shared, so that copying the list at a peak copies
/// only pointers.
struct Item {
  std::shared_ptr<const std::string> tag;
  Category category = Category::other;
  std::int64_t bytes = 0;
  std::int64_t count = 0;
};

class TierAccounting {
 public:
  void allocate(Category category, std::int64_t bytes, std::string_view tag, const std::string& phase) {
    account_.persistent[category] += bytes;
    total_ += bytes;
    raise(category, bytes);
    add_item(category, bytes, tag);
    record_peak(phase);
  }

  void release(Category category, std::int64_t bytes, std::string_view tag) {
    keep_peak();
    account_.persistent[category] -= bytes;
    account_.current[category] -= bytes;
    total_ -= bytes;
    remove_item(category, bytes, tag);
  }

  void occupy(Category category, std::int64_t bytes, std::string_view tag, const std::string& phase) {
    account_.current[Category::other] -= bytes;
    occupied_ += bytes;
    raise(category, bytes);
    add_item(category, bytes, tag);
    record_peak(phase);
  }

  void vacate(Category category, std::int64_t bytes, std::string_view tag) {
    keep_peak();
    account_.current[category] -= bytes;
    occupied_ -= bytes;
    raise(Category::other, bytes);
    remove_item(category, bytes, tag);
  }

  void count_as_step_memory(Category category, std::int64_t bytes) { account_.persistent[category] -= bytes; }

  void reset_peaks(const std::string& phase) {
    account_.category_peak = account_.current;
    account_.peak = total_;
    account_.peak_phase = phase;
    account_.at_peak = account_.current;
    peak_pending_ = true;
  }

  TierAccount account() const {
    TierAccount result = account_;
    result.live_at_peak = peak_pending_ ? list(items_, occupied_) : list(peak_items_, peak_occupied_);
    return result;
  }

  std::vector<LiveItem> live() const { return list(items_, occupied_); }
  std::int64_t total() const { return total_; }
  const TierAccount& numbers() const { return account_; }

 private:
  static std::vector<LiveItem> list(const std::vector<Item>& items, std::int64_t occupied) {
    std::vector<LiveItem> result;
    for (const Item& item : items) {
      for (std::int64_t i = 0; i < item.count; ++i) {
        std::int64_t bytes = item.bytes;
        if (*item.tag == step_arena_tag) {
          // An arena's block is listed with the bytes that no slot occupies; the slots are listed themselves.
          const std::int64_t taken = std::min(bytes, occupied);
          occupied -= taken;
          bytes -= taken;
          if (taken > 0 && bytes == 0) continue;
        }
        result.push_back({*item.tag, item.category, bytes});
      }
    }
    std::sort(result.begin(), result.end(), [](const LiveItem& a, const LiveItem& b) {
      return a.bytes != b.bytes ? a.bytes > b.bytes : a.tag < b.tag;
    });
    return result;
  }

  void raise(Category category, std::int64_t bytes) {
    account_.current[category] += bytes;
    account_.category_peak[category] = std::max(account_.category_peak[category], account_.current[category]);
  }

  // Only the numbers are copied here. The list of items is copied when the state next falls, so a run of
  // allocations that each set a new peak costs one copy.
  void record_peak(const std::string& phase) {
    const bool higher = total_ > account_.peak;
    const bool clearer =
        total_ == account_.peak && account_.current[Category::other] < account_.at_peak[Category::other];
    if (!higher && !clearer) return;
    account_.peak = total_;
    account_.at_peak = account_.current;
    account_.peak_phase = phase;
    peak_pending_ = true;
  }

  void keep_peak() {
    if (!peak_pending_) return;
    peak_pending_ = false;
    peak_occupied_ = occupied_;
    try {
      peak_items_ = items_;
    } catch (const std::bad_alloc&) {  // called while freeing: losing the names is better than not freeing
      peak_items_.clear();
    }
  }

  void add_item(Category category, std::int64_t bytes, std::string_view tag) {
    if (const auto found = index_.find({tag, category, bytes}); found != index_.end()) {
      ++items_[found->second].count;
      return;
    }
    items_.push_back({std::make_shared<const std::string>(tag), category, bytes, 1});
    index_[{*items_.back().tag, category, bytes}] = items_.size() - 1;
  }

  void remove_item(Category category, std::int64_t bytes, std::string_view tag) {
    const auto found = index_.find({tag, category, bytes});
    if (found == index_.end()) return;
    const std::size_t at = found->second;
    if (--items_[at].count > 0) return;
    index_.erase(found);
    if (at + 1 != items_.size()) {
      items_[at] = std::move(items_.back());
      index_[{*items_[at].tag, items_[at].category, items_[at].bytes}] = at;
    }
    items_.pop_back();
  }

  TierAccount account_;
  std::int64_t total_ = 0;
  std::int64_t occupied_ = 0;
  std::vector<Item> items_;
  std::unordered_map<ItemKey, std::size_t, ItemKeyHash> index_;
  bool peak_pending_ = false;  // the present items are those of the peak
  std::vector<Item> peak_items_;
  std::int64_t peak_occupied_ = 0;
};

}  // namespace

struct Ledger::Impl {
  mutable std::mutex mutex;
  std::array<TierAccounting, tier_count> tiers;
  std::string phase;  // includes the unit
  std::size_t phase_length = 0;
  LedgerObserver* observer = nullptr;
  std::function<void(std::string_view, std::string_view)> mark;  // for the issuing thread; not guarded

  std::string_view phase_name() const { return std::string_view(phase).substr(0, phase_length); }
  std::string_view unit_name() const {
    return phase.size() > phase_length ? std::string_view(phase).substr(phase_length + 1)
                                       : std::string_view();
  }
  void tell(LedgerChange::Kind kind, Tier tier, Category category, std::int64_t bytes,
            std::string_view tag) noexcept {
    if (observer != nullptr) observer->changed({kind, tier, category, bytes, tag});
  }
  TierAccounting& accounting(Tier tier) { return tiers[static_cast<std::size_t>(tier)]; }
};

Ledger::Ledger() : impl_(std::make_unique<Impl>()) {}
Ledger::~Ledger() = default;

void Ledger::allocated(Tier tier, Category category, std::int64_t bytes, std::string_view tag) {
  std::lock_guard lock(impl_->mutex);
  impl_->accounting(tier).allocate(category, bytes, tag, impl_->phase);
  impl_->tell(LedgerChange::Kind::allocated, tier, category, bytes, tag);
}

void Ledger::released(Tier tier, Category category, std::int64_t bytes, std::string_view tag) noexcept {
  std::lock_guard lock(impl_->mutex);
  impl_->accounting(tier).release(category, bytes, tag);
  impl_->tell(LedgerChange::Kind::released, tier, category, bytes, tag);
}

void Ledger::occupied(Tier tier, Category category, std::int64_t bytes, std::string_view tag) {
  std::lock_guard lock(impl_->mutex);
  impl_->accounting(tier).occupy(category, bytes, tag, impl_->phase);
  impl_->tell(LedgerChange::Kind::occupied, tier, category, bytes, tag);
}

void Ledger::vacated(Tier tier, Category category, std::int64_t bytes, std::string_view tag) noexcept {
  std::lock_guard lock(impl_->mutex);
  impl_->accounting(tier).vacate(category, bytes, tag);
  impl_->tell(LedgerChange::Kind::vacated, tier, category, bytes, tag);
}

void Ledger::assigned_to_step(Tier tier, Category category, std::int64_t bytes) noexcept {
  std::lock_guard lock(impl_->mutex);
  impl_->accounting(tier).count_as_step_memory(category, bytes);
}

void Ledger::mark_phases(std::function<void(std::string_view, std::string_view)> mark) {
  impl_->mark = std::move(mark);
}

void Ledger::set_phase(std::string_view phase, std::string_view unit) {
  if (impl_->mark) impl_->mark(phase, unit);
  std::lock_guard lock(impl_->mutex);
  impl_->phase = phase;
  impl_->phase_length = phase.size();
  if (!unit.empty()) impl_->phase.append(" ").append(unit);
  if (impl_->observer != nullptr) impl_->observer->phase_changed(phase, unit);
}

std::string Ledger::doing() const {
  std::lock_guard lock(impl_->mutex);
  std::string text(impl_->phase_name());
  if (!impl_->unit_name().empty()) text.append(" of ").append(impl_->unit_name());
  return text;
}

std::int64_t Ledger::total(Tier tier) const {
  std::lock_guard lock(impl_->mutex);
  return impl_->accounting(tier).total();
}

void Ledger::observe(LedgerObserver* observer) {
  std::lock_guard lock(impl_->mutex);
  if (observer != nullptr && impl_->observer != nullptr) {
    throw LogicError("a ledger has one observer at a time, and another one listens already");
  }
  if (observer != nullptr) {
    LedgerState state;
    state.phase = impl_->phase_name();
    state.unit = impl_->unit_name();
    for (const Tier tier : all_tiers) {
      state.current[static_cast<std::size_t>(tier)] = impl_->accounting(tier).numbers().current;
      state.live[static_cast<std::size_t>(tier)] = impl_->accounting(tier).live();
    }
    observer->attached(state);
  }
  impl_->observer = observer;
}

TierAccount Ledger::account(Tier tier) const {
  std::lock_guard lock(impl_->mutex);
  return impl_->tiers[static_cast<std::size_t>(tier)].account();
}

void Ledger::reset_peaks() {
  std::lock_guard lock(impl_->mutex);
  for (TierAccounting& tier : impl_->tiers) tier.reset_peaks(impl_->phase);
}

std::string Ledger::table() const {
  std::lock_guard lock(impl_->mutex);
  std::string text;
  for (const Tier tier : all_tiers) {
    const TierAccount& numbers = impl_->tiers[static_cast<std::size_t>(tier)].numbers();
    if (numbers.peak == 0 && numbers.current.total() == 0) continue;
    text += fmt::format("{:<16}{:>14}{:>14}\n", fmt::format("{} memory", name_of(tier)), "now", "at peak");
    for (const Category category : all_categories) {
      if (numbers.current[category] == 0 && numbers.at_peak[category] == 0) continue;
      text += fmt::format("  {:<14}{:>14}{:>14}\n", name_of(category),
                          format_bytes(numbers.current[category]), format_bytes(numbers.at_peak[category]));
    }
    text += fmt::format("  {:<14}{:>14}{:>14}", "total", format_bytes(numbers.current.total()),
                        format_bytes(numbers.peak));
    if (!numbers.peak_phase.empty()) text += fmt::format("   (peak in {})", numbers.peak_phase);
    text += "\n";
  }
  return text.empty() ? "no memory is held\n" : text;
}

std::string format_bytes(std::int64_t bytes) {
  if (bytes > -1024 && bytes < 1024) return fmt::format("{} B", bytes);
  static constexpr const char* units[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  // Without this, 1023.996 would print as 1024.00.
  while (std::abs(value) >= 1023.995 && unit + 1 < std::size(units)) {
    value /= 1024;
    ++unit;
  }
  return fmt::format("{:.2f} {}", value, units[unit]);
}

}  // namespace tranche
