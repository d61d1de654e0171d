#include "pipeline/schedule/certificate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "pipeline/schedule/generators.h"
#include "pipeline/schedule/simulate.h"
#include "tranche/core/error.h"

namespace tranche::pipeline {
namespace {

/// The shortest step among all schedules that split the backward, with unit times: a search over all actions
/// of the stages in each unit of time. A state contains the progress of each stage with each micro-batch: 0,
/// F, I or W. Micro-batches are interchangeable, so their states are sorted.
class Search {
 public:
  Search(int stages, int micro_batches, int cap)
      : stages_(stages),
        micro_batches_(micro_batches),
        cap_(cap),
        seen_(std::size_t{1} << (2 * stages * micro_batches)) {}

  int shortest() {
    const std::uint32_t end = static_cast<std::uint32_t>(seen_.size() - 1);
    std::vector<std::uint32_t> now{0}, next;
    for (int time = 0; !now.empty(); ++time) {
      next.clear();
      for (const std::uint32_t state : now) {
        if (state == end) return time;
        step(state, state, 0, next);
      }
      now.swap(next);
    }
    return -1;
  }

 private:
  int at(std::uint32_t state, int micro_batch, int stage) const {
    return static_cast<int>(state >> shift(micro_batch, stage) & 3);
  }
  int shift(int micro_batch, int stage) const { return 2 * (micro_batch * stages_ + stage); }
  std::uint32_t in_order(std::uint32_t state) const {
    std::array<std::uint32_t, 4> columns{};
    const std::uint32_t mask = (1u << (2 * stages_)) - 1;
    for (int m = 0; m < micro_batches_; ++m)
      columns[static_cast<std::size_t>(m)] = state >> (2 * stages_ * m) & mask;
    std::sort(columns.begin(), columns.begin() + micro_batches_);
    std::uint32_t sorted = 0;
    for (int m = 0; m < micro_batches_; ++m)
      sorted |= columns[static_cast<std::size_t>(m)] << (2 * stages_ * m);
    return sorted;
  }
  /// Tries all actions of `stage` and later stages in a unit of time that began in state `from`.
  void step(std::uint32_t from, std::uint32_t to, int stage, std::vector<std::uint32_t>& next) {
    if (stage == stages_) {
      const std::uint32_t state = in_order(to);
      if (!seen_[state]) next.push_back(state);
      seen_[state] = true;
      return;
    }
    int open = 0;
    for (int m = 0; m < micro_batches_; ++m)
      open += at(from, m, stage) == 1 || at(from, m, stage) == 2 ? 1 : 0;
    bool gradient = false;
    for (int m = 0; m < micro_batches_; ++m) {
      const int done = at(from, m, stage);
      const bool can = done == 0   ? open < cap_ && (stage == 0 || at(from, m, stage - 1) >= 1)
                       : done == 1 ? stage + 1 == stages_ || at(from, m, stage + 1) >= 2
                                   : done == 2;
      if (!can) continue;
      gradient = gradient || done > 0;
      step(from, to + (1u << shift(m, stage)), stage + 1, next);
    }
    // Idling instead of an input or a weight gradient is never better; instead of a forward pass it may save
    // memory.
    if (!gradient) step(from, to, stage + 1, next);
  }

  int stages_, micro_batches_, cap_;
  std::vector<bool> seen_;
};

void expect_optimum(int p, int m) {
  for (const int cap : {p, p + 1}) {
    const int optimum = Search(p, m, cap).shortest();
    EXPECT_EQ(optimum, lower_bounds(generate("zb-h1", p, m), StageTimes::equal(p)).bound())
        << "p " << p << " m " << m << " cap " << cap;
    if (m >= p) {
      EXPECT_EQ(optimum, simulate(generate("zb-h1", p, m), StageTimes::equal(p)).length);
    }
  }
}

TEST(Certificate, EqualsTheOptimumOfAnExhaustiveSearch) {
  for (int p = 1; p <= 3; ++p) {
    for (int m = 1; m <= 4; ++m) expect_optimum(p, m);
  }
}

TEST(Certificate, TheSearchFeelsItsCap) {
  // With two active micro-batches three stages need three units more (17 instead of 14).
  EXPECT_EQ(Search(3, 4, 2).shortest(), 17);
}

TEST(Certificate, BothBoundsDecide) {
  // Many micro-batches: the last rank starts after three forward passes, and works for 24 units.
  const Certificate many = lower_bounds(generate("zb-h1", 4, 8), StageTimes::equal(4));
  EXPECT_EQ(many.by_rank, 27);
  EXPECT_EQ(many.by_path, 23);
  EXPECT_EQ(many.bound(), 27);
  // One micro-batch: its path through all stages and back, and the last weight gradient.
  const Certificate one = lower_bounds(generate("zb-h1", 4, 1), StageTimes::equal(4));
  EXPECT_EQ(one.by_rank, 6);
  EXPECT_EQ(one.by_path, 9);
  EXPECT_EQ(one.bound(), 9);
  // A backward that is not split must return through all stages.
  const Certificate whole = lower_bounds(generate("1f1b", 4, 8), StageTimes::equal(4));
  EXPECT_EQ(whole.by_rank, 33);
  EXPECT_EQ(whole.by_path, 33);
  EXPECT_THROW(lower_bounds(generate("1f1b", 4, 8), StageTimes::equal(3)), InvalidArgument);
}

}  // namespace
}  // namespace tranche::pipeline
