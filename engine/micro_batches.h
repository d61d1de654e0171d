#pragma once
/// The open micro-batches of a step, and the current one, to which a model's calls apply. Private to engine/.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tranche::detail {

/// Numbers micro-batches from 0 within a step (or an evaluation, where only one is open at a time) and stores
/// the data of each while it is open. It uses no other part of the engine.
class MicroBatches {
 public:
  /// `units`: the model's number of units.
  explicit MicroBatches(std::size_t units) : units_(units) {}

  /// Opens the next micro-batch with these samples (in the caller's memory), makes it the current one and
  /// returns its number.
  std::int64_t open(std::span<const std::int64_t> samples);
  /// Closes an open one. If it was the current one, the lowest remaining open one becomes current.
  void close(std::int64_t number);
  /// Restarts the numbers at 0 and discards open micro-batches.
  void restart() {
    begun_ = 0;
    open_.clear();
  }

  bool any_open() const { return !open_.empty(); }
  bool is_open(std::int64_t number) const;
  /// The number of micro-batches of the step that were opened.
  std::int64_t begun() const { return begun_; }
  /// The number of micro-batches of the step that were closed.
  std::int64_t closed() const { return begun_ - static_cast<std::int64_t>(open_.size()); }
  /// The current micro-batch; if none is open, the number of the next one.
  std::int64_t current() const { return any_open() ? current_ : begun_; }
  /// Makes an open one the current one.
  void select(std::int64_t number) { current_ = number; }
  /// Samples of the current micro-batch; empty if none is open.
  std::span<const std::int64_t> samples() const;

  /// Counts a handle of the unit for the micro-batch.
  void hold(std::int64_t number, int unit) { ++held(number, unit); }
  /// Releases a handle; no effect if the micro-batch is already closed.
  void let_go(std::int64_t number, int unit);
  /// The lowest unit of which the micro-batch holds a handle; -1: none.
  int first_held(std::int64_t number) const;

 private:
  struct Open {
    std::int64_t number = 0;
    std::span<const std::int64_t> samples;
    std::vector<int> held;  ///< the number of handles, by unit
  };
  const Open* find(std::int64_t number) const;
  int& held(std::int64_t number, int unit);

  std::size_t units_;
  std::int64_t begun_ = 0, current_ = 0;
  std::vector<Open> open_;  ///< in ascending order
};

}  // namespace tranche::detail
