#include "device/packing_search.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

namespace tranche::detail {
namespace {

// The budget in comparisons of two items, which take two to three nanoseconds each.
constexpr double search_budget = 1.2e7;
// A packing within this distance of the lower bound is not improved further.
constexpr std::int64_t close_enough(std::int64_t live_peak) {
  return live_peak + live_peak / 500;
}

using Order = std::vector<std::uint32_t>;

/// Places items one after the other, each in the lowest (or tightest) gap among the placed items that live at
/// the same time.
class Placer {
 public:
  explicit Placer(const std::vector<PackingItem>& items)
      : items_(items), offsets_(items.size(), 0), placed_in_(items.size(), 0) {
    placed_.reserve(items.size());
    find_neighbours();
  }

  /// The height reached, or a value >= `give_up` as soon as that is certain.
  std::int64_t place(const Order& order, bool tightest, std::int64_t give_up) {
    placed_.clear();
    ++round_;
    work_ += static_cast<std::int64_t>(order.size());  // copying the order is work too
    std::int64_t height = 0;
    for (const std::uint32_t index : order) {
      const PackingItem& item = items_[index];
      const std::vector<Placed>& others = in_the_way(index);
      const std::int64_t offset = tightest ? tightest_gap(item, others) : lowest_gap(item, others);
      height = std::max(height, offset + item.bytes);
      if (height >= give_up) return height;
      offsets_[index] = offset;
      placed_in_[index] = round_;
      if (scans_) insert({item.begin, item.end, offset, offset + item.bytes});
    }
    return height;
  }

  const std::vector<std::int64_t>& offsets() const { return offsets_; }
  /// The number of comparisons so far.
  std::int64_t work() const { return work_; }

 private:
  struct Placed {
    std::int64_t begin, end, offset, top;
  };

  // Lists the overlapping items of each item that overlaps few others; for the rest all placed items are
  // scanned.
  void find_neighbours() {
    const std::size_t count = items_.size();
    std::vector<std::int64_t> begins(count), ends(count);
    for (std::size_t i = 0; i < count; ++i) {
      begins[i] = items_[i].begin;
      ends[i] = items_[i].end;
    }
    std::sort(begins.begin(), begins.end());
    std::sort(ends.begin(), ends.end());
    neighbours_.resize(count);
    few_.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      const auto before = std::upper_bound(ends.begin(), ends.end(), items_[i].begin) - ends.begin();
      const auto until = std::lower_bound(begins.begin(), begins.end(), items_[i].end) - begins.begin();
      few_[i] = 16 * (until - before) < static_cast<std::ptrdiff_t>(count);
      if (!few_[i]) scans_ = true;
    }
    Order by_begin(count);
    std::iota(by_begin.begin(), by_begin.end(), 0u);
    std::stable_sort(by_begin.begin(), by_begin.end(),
                     [&](std::uint32_t a, std::uint32_t b) { return items_[a].begin < items_[b].begin; });
    Order active;
    for (const std::uint32_t index : by_begin) {
      std::erase_if(active, [&](std::uint32_t other) { return items_[other].end <= items_[index].begin; });
      for (const std::uint32_t other : active) {
        if (few_[index]) neighbours_[index].push_back(other);
        if (few_[other]) neighbours_[other].push_back(index);
      }
      work_ += static_cast<std::int64_t>(active.size());
      active.push_back(index);
    }
  }

  // Placed items by offset; the list may contain items that live at another time.
  const std::vector<Placed>& in_the_way(std::uint32_t index) {
    if (!few_[index]) return placed_;
    near_.clear();
    for (const std::uint32_t other : neighbours_[index]) {
      if (placed_in_[other] != round_) continue;
      const PackingItem& item = items_[other];
      near_.push_back({item.begin, item.end, offsets_[other], offsets_[other] + item.bytes});
    }
    std::sort(near_.begin(), near_.end(),
              [](const Placed& a, const Placed& b) { return a.offset < b.offset; });
    work_ += static_cast<std::int64_t>(neighbours_[index].size() + 4 * near_.size());
    return near_;
  }

  void insert(const Placed& entry) {
    placed_.insert(
        std::upper_bound(placed_.begin(), placed_.end(), entry.offset,
                         [](std::int64_t value, const Placed& other) { return value < other.offset; }),
        entry);
  }

  std::int64_t lowest_gap(const PackingItem& item, const std::vector<Placed>& others) {
    std::int64_t offset = 0;
    std::int64_t seen = 0;
    for (const Placed& other : others) {
      ++seen;
      if (other.begin >= item.end || item.begin >= other.end) continue;
      if (other.offset >= offset + item.bytes) break;
      offset = std::max(offset, other.top);
    }
    work_ += seen;
    return offset;
  }

  std::int64_t tightest_gap(const PackingItem& item, const std::vector<Placed>& others) {
    std::int64_t floor = 0;
    std::int64_t best = -1;
    std::int64_t smallest = std::numeric_limits<std::int64_t>::max();
    for (const Placed& other : others) {
      if (other.begin >= item.end || item.begin >= other.end) continue;
      const std::int64_t gap = other.offset - floor;
      if (gap >= item.bytes && gap < smallest) {
        smallest = gap;
        best = floor;
      }
      floor = std::max(floor, other.top);
    }
    work_ += static_cast<std::int64_t>(others.size());
    return best >= 0 ? best : floor;
  }

  const std::vector<PackingItem>& items_;
  std::vector<std::int64_t> offsets_;
  std::vector<std::int64_t> placed_in_;  // the round in which an item was last placed
  std::int64_t round_ = 0;
  std::vector<Order> neighbours_;
  std::vector<char> few_;  // neighbours_ lists all overlapping items
  bool scans_ = false;     // some item needs placed_
  std::vector<Placed> placed_;
  std::vector<Placed> near_;
  std::int64_t work_ = 0;
};

/// The live bytes at each instant, and their maximum over ranges of instants (a sparse table).
class Load {
 public:
  explicit Load(const std::vector<PackingItem>& items) {
    std::int64_t instants = 0;
    for (const PackingItem& item : items) instants = std::max(instants, item.end);
    std::vector<std::int64_t> live(static_cast<std::size_t>(instants) + 1, 0);
    for (const PackingItem& item : items) {
      live[static_cast<std::size_t>(item.begin)] += item.bytes;
      live[static_cast<std::size_t>(item.end)] -= item.bytes;
    }
    std::partial_sum(live.begin(), live.end(), live.begin());
    highest_.push_back(std::move(live));
    for (std::size_t width = 1; 2 * width <= highest_[0].size(); width *= 2) {
      const std::vector<std::int64_t>& lower = highest_.back();
      std::vector<std::int64_t> upper(highest_[0].size() - 2 * width + 1);
      for (std::size_t i = 0; i < upper.size(); ++i) upper[i] = std::max(lower[i], lower[i + width]);
      highest_.push_back(std::move(upper));
    }
  }

  std::int64_t highest() const { return *std::max_element(highest_[0].begin(), highest_[0].end()); }

  std::int64_t highest_during(const PackingItem& item) const {
    const auto length = static_cast<std::uint64_t>(item.end - item.begin);
    const auto level = static_cast<std::size_t>(std::bit_width(length)) - 1;
    const std::vector<std::int64_t>& row = highest_[level];
    return std::max(row[static_cast<std::size_t>(item.begin)],
                    row[static_cast<std::size_t>(item.end) - (std::size_t{1} << level)]);
  }

 private:
  std::vector<std::vector<std::int64_t>> highest_;
};

/// Initial orders for placing. One places the longest-lived items lowest, as a forward pass's activations
/// need; one starts with items that are alive when memory is scarcest; the rest are for other kinds of
/// lifetimes.
std::vector<Order> starting_orders(const std::vector<PackingItem>& items) {
  const auto by = [&](auto key) {
    Order order(items.size());
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::uint32_t a, std::uint32_t b) { return key(items[a]) < key(items[b]); });
    return order;
  };
  const auto life = [](const PackingItem& p) { return p.end - p.begin; };
  const auto area = [&](const PackingItem& p) {
    return static_cast<double>(p.bytes) * static_cast<double>(life(p));
  };
  const Load load(items);
  const auto scarcity = [&](const PackingItem& p) { return -load.highest_during(p); };
  std::vector<Order> orders{
      by([&](const PackingItem& p) { return std::tuple(-life(p), -p.bytes); }),
      by([&](const PackingItem& p) { return std::tuple(scarcity(p), -life(p), -p.bytes); }),
      by([&](const PackingItem& p) { return std::tuple(scarcity(p), -p.bytes, -life(p)); }),
      by([&](const PackingItem& p) { return std::tuple(-p.bytes, -life(p)); }),
      by([&](const PackingItem& p) { return -area(p); }),
      by([&](const PackingItem& p) { return std::tuple(p.begin, -p.end, -p.bytes); }),
      by([&](const PackingItem& p) { return std::tuple(-p.end, p.begin, -p.bytes); })};
  // Few big items (gathered units, gradients) go below many small ones (activations).
  for (const std::int64_t part : {16, 64}) {
    const std::int64_t big = load.highest() / part;
    const auto small = [big](const PackingItem& p) { return p.bytes < big; };
    orders.push_back(by([&](const PackingItem& p) {
      return std::tuple(small(p), small(p) ? -life(p) : -p.bytes, -life(p));
    }));
    orders.push_back(by([&](const PackingItem& p) { return std::tuple(small(p), -life(p), -p.bytes); }));
    orders.push_back(by([&](const PackingItem& p) {
      return std::tuple(small(p), small(p) ? -life(p) : scarcity(p), -p.bytes, -life(p));
    }));
    orders.push_back(by(
        [&](const PackingItem& p) { return std::tuple(small(p), small(p) ? -life(p) : p.begin, -p.end); }));
  }
  return orders;
}

constexpr std::int64_t no_limit = std::numeric_limits<std::int64_t>::max();

class Search {
 public:
  /// `orders` are tried before the standard ones.
  Search(const std::vector<PackingItem>& items, std::int64_t goal, double budget, PackingAttempt& best,
         std::vector<Order> orders = {})
      : items_(items),
        placer_(items),
        goal_(goal),
        budget_(budget),
        best_(best),
        orders_(std::move(orders)) {}

  void run() {
    std::vector<State> starts;
    for (Order& order : starting_orders(items_)) orders_.push_back(std::move(order));
    for (const Order& order : orders_) {
      for (const bool tightest : {false, true}) {
        if (!best_.offsets.empty() && spent(0.5)) break;
        const std::int64_t limit = best_.offsets.empty() ? no_limit : best_.bytes + best_.bytes / 32;
        const std::int64_t height = placer_.place(order, tightest, limit);
        if (height >= limit) continue;
        starts.push_back({order, tightest, height, placer_.offsets()});
        keep(starts.back());
        if (best_.bytes <= goal_) return;
      }
    }
    std::stable_sort(starts.begin(), starts.end(),
                     [](const State& a, const State& b) { return a.height < b.height; });
    const std::size_t count = std::min<std::size_t>(starts.size(), 3);
    const double begun = used();
    for (std::size_t i = 0; i < count && best_.bytes > goal_; ++i) {
      improve(std::move(starts[i]),
              begun + (1 - begun) * static_cast<double>(i + 1) / static_cast<double>(count));
    }
  }

 private:
  struct State {
    Order order;
    bool tightest = false;
    std::int64_t height = 0;
    std::vector<std::int64_t> offsets;
  };

  double used() const { return static_cast<double>(placer_.work()) / budget_; }
  bool spent(double share) const { return used() >= share; }

  void keep(const State& state) {
    if (!best_.offsets.empty() && state.height >= best_.bytes) return;
    best_.bytes = state.height;
    best_.offsets = state.offsets;
  }

  std::size_t draw(std::size_t below) {
    random_ = random_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<std::size_t>((random_ >> 33) % below);
  }

  // Moves an item that sticks out above the goal earlier in the order, or exchanges two items, at positions
  // drawn from a fixed sequence. It accepts slightly worse results, and less so as the budget runs out
  // (threshold accepting, Dueck and Scheuer 1990).
  void improve(State state, double until) {
    const double from = used();
    std::vector<std::size_t> above;  // positions in the order of items above the goal
    bool stale = true;
    State changed = state;
    while (best_.bytes > goal_ && !spent(until)) {
      if (stale) {
        above.clear();
        for (std::size_t at = 0; at < state.order.size(); ++at) {
          if (state.offsets[state.order[at]] + items_[state.order[at]].bytes > goal_) above.push_back(at);
        }
        stale = false;
      }
      if (above.empty()) return;
      changed.order = state.order;
      const std::size_t at = above[draw(above.size())];
      const std::size_t to = draw(at + 1);
      if (draw(4) == 0) {
        std::swap(changed.order[at], changed.order[draw(changed.order.size())]);
      } else {
        std::rotate(changed.order.begin() + static_cast<std::ptrdiff_t>(to),
                    changed.order.begin() + static_cast<std::ptrdiff_t>(at),
                    changed.order.begin() + static_cast<std::ptrdiff_t>(at) + 1);
      }
      const double heat = 0.01 * std::max(0.0, 1 - (used() - from) / (until - from));
      const std::int64_t limit =
          state.height + 1 + static_cast<std::int64_t>(heat * static_cast<double>(goal_));
      changed.height = placer_.place(changed.order, state.tightest, limit);
      if (changed.height >= limit) continue;
      changed.offsets = placer_.offsets();
      std::swap(state, changed);
      stale = true;
      keep(state);
    }
  }

  const std::vector<PackingItem>& items_;
  Placer placer_;
  std::int64_t goal_;
  double budget_;
  PackingAttempt& best_;
  std::vector<Order> orders_;
  std::uint64_t random_ = 0x9e3779b97f4a7c15ull;
};

/// The items of a packing sorted by offset. Placing them in this order at the lowest gaps never increases the
/// height.
Order upwards(const PackingAttempt& attempt) {
  Order order(attempt.offsets.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return attempt.offsets[a] < attempt.offsets[b]; });
  return order;
}

/// Packs the few big items (gathered units, gradients, communication buffers) separately first, where a
/// search is cheap, and puts the many small ones (activations) on top, longest lived first. Empty when the
/// items do not divide into two such kinds.
std::vector<Order> big_items_first(const std::vector<PackingItem>& items, std::int64_t goal, double budget) {
  Order big, small;
  for (std::uint32_t i = 0; i < items.size(); ++i) (items[i].bytes >= goal / 64 ? big : small).push_back(i);
  if (big.empty() || 2 * big.size() > items.size()) return {};
  std::vector<PackingItem> part;
  for (const std::uint32_t i : big) part.push_back(items[i]);
  normalize_times(part);
  PackingAttempt attempt;
  Search(part, close_enough(packing_live_peak(part)), budget, attempt).run();
  Order order;
  for (const std::uint32_t i : upwards(attempt)) order.push_back(big[i]);
  std::stable_sort(small.begin(), small.end(), [&](std::uint32_t a, std::uint32_t b) {
    return items[a].end - items[a].begin > items[b].end - items[b].begin;
  });
  order.insert(order.end(), small.begin(), small.end());
  return {std::move(order)};
}

}  // namespace

void normalize_times(std::vector<PackingItem>& items) {
  struct Edge {
    std::int64_t time;
    bool is_begin;  // at equal times ends come first: such items do not overlap
    std::size_t item;
    auto key() const { return std::tuple(time, is_begin, item); }
  };
  std::vector<Edge> edges;
  edges.reserve(2 * items.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    edges.push_back({items[i].begin, true, i});
    edges.push_back({items[i].end, false, i});
  }
  std::sort(edges.begin(), edges.end(), [](const Edge& a, const Edge& b) { return a.key() < b.key(); });
  std::int64_t instant = 0;
  bool released = false;
  for (const Edge& edge : edges) {
    if (edge.is_begin) {
      if (released) ++instant;
      released = false;
      items[edge.item].begin = instant;
    } else {
      released = true;
      items[edge.item].end = instant + 1;
    }
  }
}

std::int64_t packing_live_peak(const std::vector<PackingItem>& items) {
  std::vector<std::pair<std::int64_t, std::int64_t>> changes;
  changes.reserve(2 * items.size());
  for (const PackingItem& item : items) {
    changes.emplace_back(item.begin, item.bytes);
    changes.emplace_back(item.end, -item.bytes);
  }
  std::sort(changes.begin(), changes.end());  // at equal times releases come first, being negative
  std::int64_t live = 0;
  std::int64_t peak = 0;
  for (const auto& [time, bytes] : changes) {
    live += bytes;
    peak = std::max(peak, live);
  }
  return peak;
}

PackingAttempt search_packing(const std::vector<PackingItem>& items, double share) {
  const std::int64_t goal = close_enough(packing_live_peak(items));
  // Items with the same lifetime are merged into one: fewer to place, and seldom worse.
  std::vector<PackingItem> merged;
  std::vector<std::pair<std::size_t, std::int64_t>> place_of(
      items.size());  // merged item and offset inside it
  std::map<std::pair<std::int64_t, std::int64_t>, std::size_t> lifetimes;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const auto [found, is_new] = lifetimes.try_emplace({items[i].begin, items[i].end}, merged.size());
    if (is_new) merged.push_back({items[i].begin, items[i].end, 0});
    place_of[i] = {found->second, merged[found->second].bytes};
    merged[found->second].bytes += items[i].bytes;
  }
  const double budget = share * search_budget;
  PackingAttempt coarse;
  Search(merged, goal, budget / 2, coarse, big_items_first(merged, goal, budget / 4)).run();
  PackingAttempt best;
  best.bytes = coarse.bytes;
  best.offsets.resize(items.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    best.offsets[i] = coarse.offsets[place_of[i].first] + place_of[i].second;
  }
  if (best.bytes > goal) Search(items, goal, budget / 4, best, {upwards(best)}).run();
  return best;
}

}  // namespace tranche::detail
