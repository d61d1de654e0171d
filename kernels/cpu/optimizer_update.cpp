#include "kernels/cpu/optimizer_update.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "hwy/cache_control.h"
#include "kernels/cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/optimizer_update.cpp"
#include "hwy/foreach_target.h"
#include "kernels/cpu/optimizer_streams.h"
#include "kernels/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

/// adam_element of update_arithmetic.h, a vector at a time.
class AdamRule {
 public:
  static constexpr bool has_second = true;
  explicit AdamRule(const AdamArguments& arguments)
      : a_(arguments),
        decay_(arguments.decoupled ? arguments.learning_rate * arguments.weight_decay
                                   : arguments.weight_decay) {}
  bool has_first() const { return true; }
  bool reads_first() const { return true; }
  template <class D, class V>
  HWY_INLINE void operator()(D d, V g, V& w, V& m, V& v) const {
    g = hn::Mul(g, hn::Set(d, a_.gradient_scale));
    const auto decayed = hn::Mul(hn::Set(d, decay_), w);
    if (a_.decoupled) {
      w = hn::Sub(w, decayed);
    } else {
      g = hn::Add(g, decayed);
    }
    m = hn::Add(hn::Mul(hn::Set(d, a_.beta1), m), hn::Mul(hn::Set(d, 1.0f - a_.beta1), g));
    v = hn::Add(hn::Mul(hn::Set(d, a_.beta2), v), hn::Mul(hn::Mul(hn::Set(d, 1.0f - a_.beta2), g), g));
    const auto denominator = hn::Add(hn::Sqrt(v), hn::Set(d, a_.corrected_epsilon));
    w = hn::Sub(w, hn::Mul(hn::Set(d, a_.step_size), hn::Div(m, denominator)));
  }

 private:
  AdamArguments a_;
  float decay_;
};

/// sgd_element and sgd_momentum_element, a vector at a time; the buffer is the first moment.
class SgdRule {
 public:
  static constexpr bool has_second = false;
  explicit SgdRule(const SgdArguments& arguments) : a_(arguments) {}
  bool has_first() const { return a_.momentum != 0; }
  bool reads_first() const { return has_first() && !a_.first_step; }
  template <class D, class V>
  HWY_INLINE void operator()(D d, V g, V& w, V& b, V&) const {
    g = hn::Add(hn::Mul(g, hn::Set(d, a_.gradient_scale)), hn::Mul(hn::Set(d, a_.weight_decay), w));
    auto direction = g;
    if (has_first()) {
      const auto momentum = hn::Set(d, a_.momentum);
      if (a_.first_step) {
        b = g;
      } else {
        b = hn::Add(hn::Mul(momentum, b), hn::Mul(hn::Set(d, 1.0f - a_.dampening), g));
      }
      direction = a_.nesterov ? hn::Add(g, hn::Mul(momentum, b)) : b;
    }
    w = hn::Sub(w, hn::Mul(hn::Set(d, a_.learning_rate), direction));
  }

 private:
  SgdArguments a_;
};

/// One vector: everything but the store of the new weight, which is returned in fp32.
template <class D, class Rule, class Gradient, class Moment>
HWY_INLINE hn::VFromD<D> update_vector(D d, const Rule& rule, const UpdateStreams<Gradient, Moment>& s,
                                       std::int64_t i) {
  auto w = load(d, s.master + i);
  auto first = hn::Zero(d), second = hn::Zero(d);
  if (rule.reads_first()) first = load(d, s.first + i);
  if constexpr (Rule::has_second) second = load(d, s.second + i);
  rule(d, load(d, s.gradient + i), w, first, second);
  store(d, w, s.master + i);
  if (rule.has_first()) store(d, first, s.first + i);
  if constexpr (Rule::has_second) store(d, second, s.second + i);
  return w;
}

/// The few elements before and after the loop over whole vectors, by way of a vector on the stack: every lane
/// computes for itself. Out of line, as it is met twice a segment at most, and by value: arguments whose
/// address went out of line would be read again in every iteration of the caller's loop, whose stores might
/// have changed them for all the compiler knows.
template <class Rule, class Gradient, class Moment>
HWY_NOINLINE void update_edge(Rule rule, UpdateStreams<Gradient, Moment> s, std::int64_t first,
                              std::int64_t count) {
  const hn::ScalableTag<float> d;
  constexpr std::size_t most = hn::MaxLanes(hn::ScalableTag<float>());
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto weight_bytes = static_cast<std::size_t>(size_of(s.weight_type));
  for (std::int64_t i = first; i < first + count; i += lanes) {
    const auto n = static_cast<std::size_t>(std::min(lanes, first + count - i));
    Gradient gradient[most] = {};
    float master[most] = {}, weight[most];
    Moment moments[2][most] = {};
    std::memcpy(gradient, s.gradient + i, n * sizeof(Gradient));
    std::memcpy(master, s.master + i, n * sizeof(float));
    if (rule.reads_first()) std::memcpy(moments[0], s.first + i, n * sizeof(Moment));
    if (Rule::has_second) std::memcpy(moments[1], s.second + i, n * sizeof(Moment));
    const UpdateStreams<Gradient, Moment> local{gradient, master,        moments[0], moments[1],
                                                weight,   s.weight_type, 0};
    store_any(d, update_vector(d, rule, local, 0), s.weight_type, weight, 0);
    std::memcpy(s.master + i, master, n * sizeof(float));
    if (rule.has_first()) std::memcpy(s.first + i, moments[0], n * sizeof(Moment));
    if (Rule::has_second) std::memcpy(s.second + i, moments[1], n * sizeof(Moment));
    if (s.weight != nullptr) {
      std::memcpy(static_cast<std::byte*>(s.weight) + static_cast<std::size_t>(i) * weight_bytes, weight,
                  n * weight_bytes);
    }
  }
}

/// Asks for what the loop will need in a while. Hardware looks ahead within a page of 4 KiB only, and each
/// stream enters a new one every thousand elements. Addresses beyond the end are harmless.
template <class T>
HWY_INLINE void prefetch(const T* from, std::int64_t first, std::int64_t elements, std::int64_t ahead) {
  const auto* bytes = reinterpret_cast<const char*>(from + first) + ahead;
  for (std::int64_t b = 0; b < elements * static_cast<std::int64_t>(sizeof(T)); b += 64) {
    hwy::Prefetch(bytes + b);
  }
}

/// Elements before the first whose weight lies on a whole vector's address, as non-temporal stores want it.
template <class Streams>
std::int64_t elements_before_alignment(const Streams& s, std::int64_t first, std::int64_t lanes) {
  const auto element = static_cast<std::uintptr_t>(size_of(s.weight_type));
  const auto vector = static_cast<std::uintptr_t>(lanes) * sizeof(float);
  const auto address =
      reinterpret_cast<std::uintptr_t>(s.weight) + static_cast<std::uintptr_t>(first) * element;
  return static_cast<std::int64_t>((vector - address % vector) % vector / element);
}

template <class Rule, class Gradient, class Moment>
HWY_INLINE void update_loop(Rule rule, UpdateStreams<Gradient, Moment> s, std::int64_t first,
                            std::int64_t count, bool streaming) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = first;
  const std::int64_t end = first + count;
  if (streaming) {
    i = std::min(end, first + elements_before_alignment(s, first, lanes));
    update_edge(rule, s, first, i - first);
  }
  for (; i + 2 * lanes <= end; i += 2 * lanes) {
    prefetch(s.gradient, i, 2 * lanes, s.ahead);
    prefetch(s.master, i, 2 * lanes, s.ahead);
    if (rule.reads_first()) prefetch(s.first, i, 2 * lanes, s.ahead);
    if constexpr (Rule::has_second) prefetch(s.second, i, 2 * lanes, s.ahead);
    const auto lower = update_vector(d, rule, s, i);
    const auto upper = update_vector(d, rule, s, i + lanes);
    if (s.weight == nullptr) continue;
    switch (s.weight_type) {
      case DataType::bfloat16:
        store_pair(d, lower, upper, static_cast<bfloat16*>(s.weight) + i, streaming);
        break;
      case DataType::float16:
        store_pair(d, lower, upper, static_cast<float16*>(s.weight) + i, streaming);
        break;
      default:
        store_pair(d, lower, upper, static_cast<float*>(s.weight) + i, streaming);
    }
  }
  update_edge(rule, s, i, end - i);
}

template <class Rule>
HWY_INLINE void update_dispatch(const Rule& rule, const UpdateViews& views, std::int64_t first,
                                std::int64_t count, bool streaming) {
  with_floating(views.gradient.dtype, [&](auto gradient) HWY_ATTR {
    using Gradient = decltype(gradient);
    if (views.first.dtype == DataType::bfloat16) {
      update_loop(rule, streams_of<Gradient, bfloat16>(views), first, count, streaming);
    } else {
      update_loop(rule, streams_of<Gradient, float>(views), first, count, streaming);
    }
  });
}

void adam(const AdamArguments& arguments, const UpdateViews& views, std::int64_t first, std::int64_t count,
          bool streaming) {
  update_dispatch(AdamRule(arguments), views, first, count, streaming);
}
void sgd(const SgdArguments& arguments, const UpdateViews& views, std::int64_t first, std::int64_t count,
         bool streaming) {
  update_dispatch(SgdRule(arguments), views, first, count, streaming);
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tranche::kernels::cpu {

HWY_EXPORT(adam);
HWY_EXPORT(sgd);

namespace {

/// Calls update(arguments, first, count) for the parts of all segments, spread over threads by position in
/// the range, whatever the segments' sizes. Each range ends with its streamed weights on their way to memory.
template <class Arguments, class Update>
void for_each_part(int threads, const GroupArguments<Arguments>& groups,
                   std::span<const UpdateSegment> segments, bool streaming, const Update& update) {
  if (segments.empty()) return;
  const std::int64_t begin = segments.front().first;
  const std::int64_t total = segments.back().first + segments.back().count - begin;
  parallel_ranges(threads, total, parallel_grain, [&](std::int64_t range, std::int64_t elements) {
    const std::int64_t first = begin + range, end = first + elements;
    auto segment = std::partition_point(segments.begin(), segments.end(),
                                        [&](const UpdateSegment& s) { return s.first + s.count <= first; });
    for (; segment != segments.end() && segment->first < end; ++segment) {
      const Arguments& arguments = groups[segment->group];
      const std::int64_t from = std::max(first, segment->first);
      const std::int64_t to = std::min(end, segment->first + segment->count);
      if (arguments.apply && from < to) update(arguments, from, to - from);
    }
    if (streaming) hwy::FlushStream();
  });
}

/// The weights of a short range stay in the caches, where their reader finds them.
bool streams(std::span<const UpdateSegment> segments, const TensorView& weight) {
  std::int64_t elements = 0;
  for (const UpdateSegment& segment : segments) elements += segment.count;
  return weight.data != nullptr && elements >= streaming_elements;
}

}  // namespace

UpdateTuning update_tuning() {
#if defined(__x86_64__)
  if (__builtin_cpu_is("intel")) return {.prefetch_bytes = 1024};
#endif
  return {};
}

void adam_update(int threads, const GroupArguments<AdamArguments>& arguments,
                 std::span<const UpdateSegment> segments, const ConstTensorView& gradient,
                 const TensorView& master, const TensorView& exp_avg, const TensorView& exp_avg_sq,
                 const TensorView& weight, const UpdateTuning& tuning) {
  const UpdateViews views{gradient, master, exp_avg, exp_avg_sq, weight, tuning};
  const bool streaming = streams(segments, weight);
  for_each_part(threads, arguments, segments, streaming,
                [&](const AdamArguments& of_group, std::int64_t first, std::int64_t count) {
                  HWY_DYNAMIC_DISPATCH(adam)(of_group, views, first, count, streaming);
                });
}

void sgd_update(int threads, const GroupArguments<SgdArguments>& arguments,
                std::span<const UpdateSegment> segments, const ConstTensorView& gradient,
                const TensorView& master, const TensorView& momentum_buffer, const TensorView& weight,
                const UpdateTuning& tuning) {
  const UpdateViews views{gradient, master, momentum_buffer, {}, weight, tuning};
  const bool streaming = streams(segments, weight);
  for_each_part(threads, arguments, segments, streaming,
                [&](SgdArguments of_group, std::int64_t first, std::int64_t count) {
                  if (momentum_buffer.data == nullptr) of_group.momentum = 0;
                  HWY_DYNAMIC_DISPATCH(sgd)(of_group, views, first, count, streaming);
                });
}

}  // namespace tranche::kernels::cpu
#endif
