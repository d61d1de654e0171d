#pragma once
/// The expected result of an optimizer's update, by the header's formulas in plain loops, and states for
/// these and for the kernels.

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/optimizer_parts.h"
#include "tests/kernels/cpu_updates.h"
#include "tranche/kernels/optimizer_update.h"
#include "vector_test_support.h"

namespace tranche::kernels::testing {

/// Buffers that an update changes; the specification and the kernel each get a copy.
struct State {
  State(DataType gradient_type, DataType moment_type, DataType weight_type, std::int64_t n, unsigned seed)
      : gradient(gradient_type, n),
        master(DataType::float32, n),
        first(moment_type, n),
        second(moment_type, n),
        weight(weight_type, n) {
    fill_random(gradient, seed);
    fill_random(master, seed + 1);
    fill_random(first, seed + 2);
    fill_random(second, seed + 3, true);
  }
  std::string bits() const { return master.bits() + first.bits() + second.bits() + weight.bits(); }
  Guarded gradient, master, first, second, weight;
};

/// The header's formulas, one element at a time. The build forbids contraction, so each operation rounds
/// separately.
inline void adam_spec(const AdamArguments& a, State& s, bool with_weight) {
  for (std::int64_t i = 0; i < s.master.elements(); ++i) {
    float g = s.gradient.get(i) * a.gradient_scale;
    float w = s.master.get(i);
    if (a.decoupled) {
      w = w - (a.learning_rate * a.weight_decay) * w;
    } else {
      g = g + a.weight_decay * w;
    }
    const float m = a.beta1 * s.first.get(i) + (1.0f - a.beta1) * g;
    const float v = a.beta2 * s.second.get(i) + ((1.0f - a.beta2) * g) * g;
    w = w - a.step_size * (m / (std::sqrt(v) + a.corrected_epsilon));
    s.master.set(i, w);
    s.first.set(i, m);
    s.second.set(i, v);
    if (with_weight) s.weight.set(i, w);
  }
}

inline void sgd_spec(const SgdArguments& a, State& s, bool with_weight) {
  for (std::int64_t i = 0; i < s.master.elements(); ++i) {
    float w = s.master.get(i);
    const float g = s.gradient.get(i) * a.gradient_scale + a.weight_decay * w;
    float d = g;
    if (a.momentum != 0) {
      const float b = a.first_step ? g : a.momentum * s.first.get(i) + (1.0f - a.dampening) * g;
      d = a.nesterov ? g + a.momentum * b : b;
      s.first.set(i, b);
    }
    w = w - a.learning_rate * d;
    s.master.set(i, w);
    if (with_weight) s.weight.set(i, w);
  }
}

inline AdamArguments adam_arguments(bool decoupled) {
  AdamArguments a;
  a.learning_rate = 3e-4f;
  a.weight_decay = 0.1f;
  const double correction = std::sqrt(1 - std::pow(0.999, 3));
  a.step_size = static_cast<float>(3e-4 * correction / (1 - std::pow(0.9, 3)));
  a.corrected_epsilon = static_cast<float>(1e-8 * correction);
  a.gradient_scale = 0.37f;
  a.decoupled = decoupled;
  return a;
}

inline std::vector<SgdArguments> sgd_arguments() {
  std::vector<SgdArguments> all;
  for (const float momentum : {0.0f, 0.9f}) {
    for (const bool nesterov : {false, true}) {
      for (const bool first_step : {false, true}) {
        SgdArguments a;
        a.learning_rate = 0.01f;
        a.momentum = momentum;
        a.dampening = nesterov ? 0.0f : 0.3f;
        a.weight_decay = 0.05f;
        a.nesterov = nesterov;
        a.first_step = first_step;
        a.gradient_scale = 1.7f;
        all.push_back(a);
      }
    }
  }
  return all;
}

/// Groups of arguments in memory that a kernel of the tested device can read.
template <class Arguments>
class TestGroups {
 public:
  explicit TestGroups(const std::vector<Arguments>& groups) : storage_(groups.begin(), groups.end()) {}
  operator GroupArguments<Arguments>() { return {storage_.data(), static_cast<int>(storage_.size())}; }

 private:
  std::vector<Arguments, TestAllocator<Arguments>> storage_;
};

/// Updates all elements with one group's arguments; the work is done on return, except on meta.
inline void adam_update_all(Stream& stream, const AdamArguments& arguments, const ConstTensorView& gradient,
                            const TensorView& master, const TensorView& exp_avg, const TensorView& exp_avg_sq,
                            const TensorView& weight) {
  TestGroups<AdamArguments> groups({arguments});
  const UpdateSegment all{0, master.elements(), 0};
  adam_update(stream, groups, {&all, 1}, gradient, master, exp_avg, exp_avg_sq, weight);
}
inline void sgd_update_all(Stream& stream, const SgdArguments& arguments, const ConstTensorView& gradient,
                           const TensorView& master, const TensorView& momentum_buffer,
                           const TensorView& weight) {
  TestGroups<SgdArguments> groups({arguments});
  const UpdateSegment all{0, master.elements(), 0};
  sgd_update(stream, groups, {&all, 1}, gradient, master, momentum_buffer, weight);
}

/// A range of segments with padding between them, whose lengths are near multiples of vectors, with two
/// alternating groups.
inline std::vector<UpdateSegment> some_segments(std::int64_t elements, std::int64_t gap, unsigned seed) {
  std::mt19937 engine(seed);
  std::vector<UpdateSegment> segments;
  for (std::int64_t at = static_cast<std::int64_t>(engine() % 5); at < elements;) {
    const auto count = std::min<std::int64_t>(elements - at, static_cast<std::int64_t>(engine() % 97));
    segments.push_back({at, count, static_cast<int>(engine() % 3)});
    at += count + (gap == 0 ? 0 : static_cast<std::int64_t>(engine()) % gap);
  }
  return segments;
}

template <class Arguments, class Spec>
void segments_spec(const std::vector<Arguments>& groups, const std::vector<UpdateSegment>& segments, State& s,
                   const Spec& spec) {
  for (const UpdateSegment& segment : segments) {
    const Arguments& arguments = groups[static_cast<std::size_t>(segment.group)];
    if (!arguments.apply) continue;
    State piece(s.gradient.dtype(), s.first.dtype(), s.weight.dtype(), segment.count, 0);
    for (std::int64_t i = 0; i < segment.count; ++i) {
      piece.gradient.set(i, s.gradient.get(segment.first + i));
      piece.master.set(i, s.master.get(segment.first + i));
      piece.first.set(i, s.first.get(segment.first + i));
      piece.second.set(i, s.second.get(segment.first + i));
    }
    spec(arguments, piece);
    for (std::int64_t i = 0; i < segment.count; ++i) {
      s.master.set(segment.first + i, piece.master.get(i));
      s.first.set(segment.first + i, piece.first.get(i));
      s.second.set(segment.first + i, piece.second.get(i));
      s.weight.set(segment.first + i, piece.weight.get(i));
    }
  }
}

/// The length from which weights are written with non-temporal stores, with a head and a tail of single
/// elements.
// Only CPUs have non-temporal stores. On a GPU the length has no meaning, and sanitized builds use a shorter
// one.
inline constexpr std::int64_t streamed_from = on_gpu && test::sanitized ? 4096 : cpu::streaming_elements;
inline constexpr std::int64_t streamed_size = streamed_from + 37;

}  // namespace tranche::kernels::testing
