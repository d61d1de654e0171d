#pragma once
/// The micro-batches of a step that are open, and which one a model's calls are of. Private to engine/.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tranche::detail {

/// Numbers micro-batches from 0 on within a step (or an evaluation, where one is open at a time) and keeps
/// what belongs to each while it is open. Knows no other part of the engine.
class MicroBatches {
 public:
  /// `units`: how many units a micro-batch may hold.
  explicit MicroBatches(std::size_t units) : units_(units) {}

  /// Opens the next one, of these samples (in the caller's memory), and makes it the current one. Returns its
  /// number.
  std::int64_t open(std::span<const std::int64_t> samples);
  /// Closes an open one. If it was the current one, the lowest of those that stay open becomes it.
  void close(std::int64_t number);
  /// Numbers begin at 0 again. Those that are open are forgotten.
  void restart() {
    begun_ = 0;
    open_.clear();
  }

  bool any_open() const { return !open_.empty(); }
  bool is_open(std::int64_t number) const;
  /// How many of the step were opened.
  std::int64_t begun() const { return begun_; }
  /// How many of the step were closed.
  std::int64_t closed() const { return begun_ - static_cast<std::int64_t>(open_.size()); }
  /// The one that calls without a number are of; the number of the next one while none is open.
  std::int64_t current() const { return any_open() ? current_ : begun_; }
  /// Makes an open one the current one.
  void select(std::int64_t number) { current_ = number; }
  /// Samples of the current one; empty while none is open.
  std::span<const std::int64_t> samples() const;

  /// Counts the handles of a unit that a micro-batch holds.
  void hold(std::int64_t number, int unit) { ++held(number, unit); }
  /// Does nothing for a micro-batch that is closed already.
  void let_go(std::int64_t number, int unit);
  /// The lowest unit that the micro-batch holds; -1: none.
  int first_held(std::int64_t number) const;

 private:
  struct Open {
    std::int64_t number = 0;
    std::span<const std::int64_t> samples;
    std::vector<int> held;  ///< by unit: handles
  };
  const Open* find(std::int64_t number) const;
  int& held(std::int64_t number, int unit);

  std::size_t units_;
  std::int64_t begun_ = 0, current_ = 0;
  std::vector<Open> open_;  ///< in ascending order
};

}  // namespace tranche::detail
