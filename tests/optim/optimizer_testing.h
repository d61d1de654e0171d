#pragma once
/// Buffers of a tensor, and updates of them as an engine makes them, for tests of optimizers.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tranche/device/device.h"
#include "tranche/optim/optimizer.h"

namespace tranche::test {

/// The same as draw() in scripts/golden_draw.py.
inline std::vector<double> draw(std::uint64_t seed, std::int64_t count) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < count; ++i) {
    seed += 0x9e3779b97f4a7c15u;
    std::uint64_t z = seed;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    values.push_back(static_cast<double>(z >> 40) * 0x1p-23 - 1.0);
  }
  return values;
}

/// A tensor of `n` elements with all of its buffers.
struct Shard {
  explicit Shard(std::size_t n, std::size_t states)
      : gradient(n), master(n), state(states, std::vector<float>(n)) {
    for (std::size_t i = 0; i < n; ++i) {
      gradient[i] = 0.25f * static_cast<float>(i) - 1.0f;
      master[i] = 1.0f - 0.125f * static_cast<float>(i);
    }
  }
  UpdateRange range() {
    const Shape shape{static_cast<std::int64_t>(gradient.size())};
    UpdateRange range;
    range.gradient = {gradient.data(), DataType::float32, shape};
    range.master = {master.data(), DataType::float32, shape};
    for (auto& tensor : state) range.state.push_back({tensor.data(), DataType::float32, shape});
    range.weight = {nullptr, DataType::float32, shape};
    return range;
  }
  std::vector<float> gradient, master;
  std::vector<std::vector<float>> state;
};

/// Applies a step as an engine does, to `segments` of a range with the options `groups` of their groups.
inline void apply_to(Stream& stream, const Optimizer& optimizer, const OptimizerStep& step, UpdateRange range,
                     const std::vector<TensorSegment>& segments, const std::vector<GroupOptions>& groups) {
  std::vector<std::byte> numbers;
  for (const GroupOptions& group : groups) {
    const std::vector<std::byte> of_group = optimizer.numbers(step, group);
    range.numbers_stride = static_cast<std::int64_t>(of_group.size());
    numbers.insert(numbers.end(), of_group.begin(), of_group.end());
  }
  range.numbers = numbers.data();
  range.groups = static_cast<int>(groups.size());
  range.segments = segments;
  optimizer.apply(stream, step, range);
  stream.synchronize();
}

inline OptimizerStep step_of(std::int64_t step, double rate) {
  OptimizerStep result;
  result.step = step;
  result.learning_rate = rate;
  return result;
}

class OptimizerTest : public ::testing::Test {
 protected:
  void apply(const Optimizer& optimizer, const OptimizerStep& step, Shard& shard,
             const GroupOptions& group = {}) {
    apply(optimizer, step, shard.range(), group);
  }
  void apply(const Optimizer& optimizer, const OptimizerStep& step, const UpdateRange& range,
             const GroupOptions& group = {}) {
    apply_to(device_->compute_stream(), optimizer, step, range, {{.count = range.master.elements()}},
             {group});
  }
  std::unique_ptr<Device> device_ = make_device({});
};

}  // namespace tranche::test
