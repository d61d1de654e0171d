#pragma once
/// Covering arrays: a few rows in which any two values of two axes occur together.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "tranche/core/random.h"

namespace tranche::test {

/// The index of each axis's value in a row.
using CoveringRow = std::vector<int>;

/// Arguments (axis, value, other axis, value); returns false if the two values cannot occur in one row.
using CanMeet = std::function<bool(std::size_t, int, std::size_t, int)>;

/// Rows for axes with the given numbers of values, in which every two values occur together that can. The
/// algorithm is greedy: each row is the best of several drawn rows that contain a missing pair (Cohen et al.,
/// 1997: AETG). Equal arguments give equal rows.
class CoveringRows {
 public:
  CoveringRows(const std::vector<int>& counts, const CanMeet& can_meet) {
    for (const int count : counts) {
      first_.push_back(values_);
      values_ += static_cast<std::size_t>(count);
      for (int value = 0; value < count; ++value) axis_.push_back(first_.size() - 1);
    }
    state_.assign(values_ * values_, State::missing);
    for (std::size_t a = 0; a < values_; ++a) {
      for (std::size_t b = 0; b < values_; ++b) {
        const std::size_t low = std::min(a, b), high = std::max(a, b);
        if (axis_[a] == axis_[b] || !can_meet(axis_[low], value(low), axis_[high], value(high))) {
          state_[a * values_ + b] = State::impossible;
        }
      }
    }
    for (std::vector<std::size_t> missing = pairs_missing(); !missing.empty(); missing = pairs_missing()) {
      std::vector<std::size_t> best;
      std::size_t most = 0;
      for (int attempt = 0; attempt < 30; ++attempt) {
        const std::vector<std::size_t> row = drawn_from(missing[below(missing.size())]);
        const std::size_t gain = row.empty() ? 0 : gain_of(row);
        if (gain > most) most = gain, best = row;
      }
      if (best.empty()) throw std::logic_error("no row of the covering array can hold a pair that may meet");
      for (const std::size_t a : best) {
        for (const std::size_t b : best) {
          if (axis_[a] != axis_[b]) state_[a * values_ + b] = State::met;
        }
      }
      CoveringRow row;
      for (const std::size_t at : best) row.push_back(value(at));
      rows_.push_back(std::move(row));
    }
  }

  const std::vector<CoveringRow>& rows() const { return rows_; }

 private:
  enum class State : std::uint8_t { missing, met, impossible };

  int value(std::size_t at) const { return static_cast<int>(at - first_[axis_[at]]); }
  std::size_t below(std::size_t n) {
    return random_bits({28, RandomPurpose::test, 1}, draws_++) % static_cast<std::uint32_t>(n);
  }
  std::vector<std::size_t> pairs_missing() const {
    std::vector<std::size_t> pairs;
    for (std::size_t pair = 0; pair < state_.size(); ++pair) {
      if (state_[pair] == State::missing) pairs.push_back(pair);
    }
    return pairs;
  }
  std::size_t gain_of(const std::vector<std::size_t>& row) const {
    std::size_t gain = 0;
    for (const std::size_t a : row) {
      for (const std::size_t b : row) gain += state_[a * values_ + b] == State::missing;
    }
    return gain;
  }
  /// A row with the values of a pair; the other axes get the values that add most missing pairs. Empty if an
  /// axis has no possible value.
  std::vector<std::size_t> drawn_from(std::size_t pair) {
    constexpr std::size_t open = ~std::size_t{0};
    std::vector<std::size_t> row(first_.size(), open), chosen{pair / values_, pair % values_}, order;
    for (const std::size_t at : chosen) row[axis_[at]] = at;
    for (std::size_t axis = 0; axis < row.size(); ++axis) {
      if (row[axis] == open)
        order.insert(order.begin() + static_cast<std::ptrdiff_t>(below(order.size() + 1)), axis);
    }
    for (const std::size_t axis : order) {
      const std::size_t end = axis + 1 < first_.size() ? first_[axis + 1] : values_;
      const std::size_t count = end - first_[axis], turn = below(count);
      std::size_t most = 0;
      for (std::size_t i = 0; i < count; ++i) {
        const std::size_t at = first_[axis] + (i + turn) % count;
        std::size_t gain = 1;
        for (const std::size_t other : chosen) {
          const State state = state_[at * values_ + other];
          gain = state == State::impossible || gain == 0 ? 0 : gain + (state == State::missing);
        }
        if (gain > most) most = gain, row[axis] = at;
      }
      if (most == 0) return {};
      chosen.push_back(row[axis]);
    }
    return row;
  }

  std::vector<std::size_t> first_;  ///< by axis: index of its first value among all values
  std::vector<std::size_t> axis_;   ///< by value: its axis
  std::size_t values_ = 0;
  std::vector<State> state_;  ///< by pair of values
  std::vector<CoveringRow> rows_;
  std::uint64_t draws_ = 0;
};

}  // namespace tranche::test
