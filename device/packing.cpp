#include "device/packing.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>

#include "device/packing_search.h"
#include "tranche/core/error.h"
#include "tranche/device/memory.h"

namespace tranche::detail {
namespace {

void check(std::span<const PackingInterval> intervals) {
  for (std::size_t i = 0; i < intervals.size(); ++i) {
    const PackingInterval& interval = intervals[i];
    if (interval.bytes < 0) {
      throw InvalidArgument("packing interval " + std::to_string(i) + " has " +
                            std::to_string(interval.bytes) + " bytes");
    }
    if (interval.end < interval.begin) {
      throw InvalidArgument("packing interval " + std::to_string(i) + " ends at " +
                            std::to_string(interval.end) + ", before it begins at " +
                            std::to_string(interval.begin));
    }
  }
}

using Members = std::vector<std::size_t>;  // indices into a list of items

/// Divides the problem into parts that can be packed separately without loss, and packs equal parts once. The
/// micro-batches of a step are such parts.
class Packer {
 public:
  explicit Packer(std::vector<PackingItem> items) : items_(std::move(items)), offsets_(items_.size(), 0) {}

  std::int64_t pack() {
    Members all(items_.size());
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
    std::sort(all.begin(), all.end(), [&](std::size_t a, std::size_t b) {
      return std::tuple(items_[a].begin, -items_[a].end, a) < std::tuple(items_[b].begin, -items_[b].end, b);
    });
    // A first round finds the distinct parts, so that the search budget is shared among them alone.
    pack_part(all, 0);
    for (auto& [key, attempt] : known_) {
      const std::vector<PackingItem> part = part_of(key);
      attempt =
          search_packing(part, static_cast<double>(part.size()) / static_cast<double>(pieces_to_search_));
    }
    return pack_part(all, 0);
  }

  const std::vector<std::int64_t>& offsets() const { return offsets_; }

 private:
  // Packs a part and returns its height. Items that live through the whole part lie at its bottom; the rest
  // may divide at instants that no item crosses. `members` are sorted by begin.
  std::int64_t pack_part(const Members& members, std::int64_t bottom) {
    if (members.empty()) return 0;
    std::int64_t first = items_[members.front()].begin;
    std::int64_t last = first;
    for (const std::size_t i : members) last = std::max(last, items_[i].end);
    std::int64_t base = 0;
    std::vector<Members> parts;
    std::int64_t reach = first;
    for (const std::size_t i : members) {
      if (items_[i].begin == first && items_[i].end == last) {
        offsets_[i] = bottom + base;
        base += items_[i].bytes;
        continue;
      }
      if (parts.empty() || items_[i].begin >= reach) parts.emplace_back();
      parts.back().push_back(i);
      reach = std::max(reach, items_[i].end);
    }
    if (base == 0 && parts.size() == 1) return pack_whole(members, bottom);
    std::int64_t height = 0;
    for (const Members& part : parts) height = std::max(height, pack_part(part, bottom + base));
    return base + height;
  }

  // Packs a part that cannot be divided further.
  std::int64_t pack_whole(const Members& members, std::int64_t bottom) {
    std::vector<PackingItem> part;
    part.reserve(members.size());
    for (const std::size_t i : members) part.push_back(items_[i]);
    normalize_times(part);
    std::vector<std::int64_t> key;
    key.reserve(3 * part.size());
    for (const PackingItem& item : part) key.insert(key.end(), {item.begin, item.end, item.bytes});
    const auto [found, is_new] = known_.try_emplace(std::move(key));
    if (is_new) pieces_to_search_ += part.size();
    if (found->second.offsets.empty()) return 0;  // in the first round only the parts are collected
    for (std::size_t i = 0; i < members.size(); ++i) offsets_[members[i]] = bottom + found->second.offsets[i];
    return found->second.bytes;
  }

  static std::vector<PackingItem> part_of(const std::vector<std::int64_t>& key) {
    std::vector<PackingItem> part;
    part.reserve(key.size() / 3);
    for (std::size_t i = 0; i < key.size(); i += 3) part.push_back({key[i], key[i + 1], key[i + 2]});
    return part;
  }

  std::vector<PackingItem> items_;
  std::vector<std::int64_t> offsets_;
  std::map<std::vector<std::int64_t>, PackingAttempt> known_;
  std::size_t pieces_to_search_ = 0;
};

}  // namespace

Packing pack_intervals(std::span<const PackingInterval> intervals) {
  check(intervals);
  Packing result;
  result.offsets.assign(intervals.size(), 0);
  std::vector<std::size_t> origin;
  std::vector<PackingItem> items;
  for (std::size_t i = 0; i < intervals.size(); ++i) {
    if (intervals[i].bytes == 0 || intervals[i].begin == intervals[i].end) continue;
    origin.push_back(i);
    items.push_back({intervals[i].begin, intervals[i].end, aligned_bytes(intervals[i].bytes)});
  }
  normalize_times(items);
  result.live_peak = packing_live_peak(items);
  Packer packer(std::move(items));
  result.bytes = packer.pack();
  for (std::size_t i = 0; i < origin.size(); ++i) result.offsets[origin[i]] = packer.offsets()[i];
  return result;
}

}  // namespace tranche::detail
