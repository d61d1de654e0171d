#include "tests/device/lifetimes.h"

#include <cstddef>
#include <deque>
#include <random>

namespace tranche::testing_support {

using detail::PackingInterval;

namespace {

/// Records acquires and releases in order, as a step arena does.
class LifetimeRecorder {
 public:
  std::size_t acquire(std::int64_t bytes) {
    intervals_.push_back({now_++, -1, bytes});
    return intervals_.size() - 1;
  }
  void release(std::size_t index) { intervals_[index].end = now_++; }
  void release(std::vector<std::size_t>& indices) {
    for (std::size_t i = indices.size(); i-- > 0;) release(indices[i]);
    indices.clear();
  }
  std::vector<PackingInterval> intervals() const { return intervals_; }

 private:
  std::vector<PackingInterval> intervals_;
  std::int64_t now_ = 0;
};

class StepLifetimes {
 public:
  explicit StepLifetimes(const StepShape& shape) : shape_(shape) {}

  std::vector<PackingInterval> intervals() {
    for (int m = 0; m < shape_.micro_batches; ++m) micro_batch();
    return recorder_.intervals();
  }

 private:
  std::int64_t stream() const { return shape_.tokens * shape_.width * 2; }
  std::int64_t unit_bytes(int unit) const {
    const bool edge = unit == 0 || unit == shape_.blocks + 1;
    const std::int64_t elements = edge ? (shape_.vocabulary + 1024) * shape_.width
                                       : 12 * shape_.width * shape_.width + 13 * shape_.width;
    return elements * 2;
  }

  // Units 0 .. blocks + 1 in forward order; `step` is +1 forward, -1 backward.
  void want(int unit, int step) {
    if (shape_.depth == 0) return;
    for (int ahead = 0; ahead <= shape_.depth; ++ahead) {
      const int index = unit + ahead * step;
      if (index < 0 || index > shape_.blocks + 1 || gathered_[static_cast<std::size_t>(index)] != none)
        continue;
      gathered_[static_cast<std::size_t>(index)] = recorder_.acquire(unit_bytes(index));
    }
  }
  void drop(int unit) {
    if (shape_.depth == 0) return;
    recorder_.release(gathered_[static_cast<std::size_t>(unit)]);
    gathered_[static_cast<std::size_t>(unit)] = none;
  }

  std::vector<std::size_t> block_forward() {
    // norm, statistics, qkv, attention output and log-sums, projection, second norm, and the four-fold hidden
    // activations twice.
    const std::int64_t row_statistics = shape_.tokens * 8;
    std::vector<std::size_t> kept;
    for (const std::int64_t bytes : {stream(), row_statistics, 3 * stream()})
      kept.push_back(recorder_.acquire(bytes));
    const std::size_t scores = recorder_.acquire(shape_.heads * shape_.tokens * 64 * 4);
    for (const std::int64_t bytes : {stream(), shape_.heads * shape_.tokens * 4}) {
      kept.push_back(recorder_.acquire(bytes));
    }
    recorder_.release(scores);
    const std::size_t projected = recorder_.acquire(stream());
    for (const std::int64_t bytes : {stream(), row_statistics, stream()})
      kept.push_back(recorder_.acquire(bytes));
    recorder_.release(projected);
    for (const std::int64_t bytes : {4 * stream(), 4 * stream()}) kept.push_back(recorder_.acquire(bytes));
    const std::size_t out = recorder_.acquire(stream());
    recorder_.release(out);
    return kept;
  }

  void block_backward(std::vector<std::size_t>& kept) {
    const std::size_t hidden = recorder_.acquire(4 * stream());
    const std::size_t before = recorder_.acquire(4 * stream());
    recorder_.release(hidden);
    recorder_.release(kept.back());
    kept.pop_back();
    recorder_.release(kept.back());
    kept.pop_back();
    const std::size_t normed = recorder_.acquire(stream());
    recorder_.release(before);
    const std::size_t attention = recorder_.acquire(stream());
    recorder_.release(normed);
    const std::size_t qkv = recorder_.acquire(3 * stream());
    const std::size_t rows = recorder_.acquire(shape_.heads * shape_.tokens * 64 * 8);
    recorder_.release(rows);
    recorder_.release(attention);
    const std::size_t input = recorder_.acquire(stream());
    recorder_.release(qkv);
    recorder_.release(input);
    recorder_.release(kept);
  }

  void reduce(std::size_t gradient, int unit) {
    const std::size_t wire = recorder_.acquire(unit_bytes(unit));
    recorder_.release(gradient);
    wires_.push_back(wire);
    while (static_cast<int>(wires_.size()) > shape_.wires_in_flight) {
      recorder_.release(wires_.front());
      wires_.pop_front();
    }
  }

  void micro_batch() {
    const int last = shape_.blocks + 1;
    gathered_.assign(static_cast<std::size_t>(last) + 1, none);
    want(0, +1);
    const std::size_t embedded = recorder_.acquire(stream());
    drop(0);
    std::vector<std::vector<std::size_t>> kept(static_cast<std::size_t>(shape_.blocks));
    std::vector<std::size_t> inputs;
    for (int b = 0; b < shape_.blocks; ++b) {
      want(b + 1, +1);
      inputs.push_back(recorder_.acquire(stream()));
      auto& mine = kept[static_cast<std::size_t>(b)];
      mine = block_forward();
      if (shape_.checkpointing) recorder_.release(mine);
      drop(b + 1);
    }
    want(last, +1);
    const std::size_t logits = recorder_.acquire(shape_.tokens / 4 * shape_.vocabulary * 4);
    std::size_t head_gradient = none;
    if (shape_.depth > 0) head_gradient = recorder_.acquire(2 * unit_bytes(last));
    std::size_t flow = recorder_.acquire(stream());
    recorder_.release(logits);
    if (shape_.depth > 0) reduce(head_gradient, last);
    drop(last);
    for (int b = shape_.blocks - 1; b >= 0; --b) {
      want(b + 1, -1);
      std::size_t gradient = none;
      if (shape_.depth > 0) gradient = recorder_.acquire(2 * unit_bytes(b + 1));
      auto& mine = kept[static_cast<std::size_t>(b)];
      if (shape_.checkpointing) mine = block_forward();
      block_backward(mine);
      recorder_.release(flow);
      flow = recorder_.acquire(stream());
      recorder_.release(inputs.back());
      inputs.pop_back();
      if (shape_.depth > 0) reduce(gradient, b + 1);
      drop(b + 1);
    }
    want(0, -1);
    std::size_t gradient = none;
    if (shape_.depth > 0) gradient = recorder_.acquire(2 * unit_bytes(0));
    recorder_.release(flow);
    recorder_.release(embedded);
    if (shape_.depth > 0) reduce(gradient, 0);
    drop(0);
    while (!wires_.empty()) {
      recorder_.release(wires_.front());
      wires_.pop_front();
    }
  }

  static constexpr std::size_t none = static_cast<std::size_t>(-1);
  StepShape shape_;
  LifetimeRecorder recorder_;
  std::vector<std::size_t> gathered_;
  std::deque<std::size_t> wires_;
};

}  // namespace

std::vector<PackingInterval> step_lifetimes(const StepShape& shape) {
  return StepLifetimes(shape).intervals();
}

std::vector<PackingInterval> random_lifetimes(std::uint64_t seed, int count, std::int64_t span) {
  std::mt19937_64 draw(seed);
  std::vector<PackingInterval> intervals;
  for (int i = 0; i < count; ++i) {
    const auto begin = static_cast<std::int64_t>(draw() % static_cast<std::uint64_t>(span));
    const std::int64_t length = std::int64_t{1} << (draw() % 8);
    const std::int64_t bytes = (std::int64_t{1} << (draw() % 20)) + static_cast<std::int64_t>(draw() % 1000);
    intervals.push_back(
        {begin, begin + 1 + static_cast<std::int64_t>(draw() % static_cast<std::uint64_t>(length)), bytes});
  }
  return intervals;
}

}  // namespace tranche::testing_support
