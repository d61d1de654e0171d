#include "kernels/cpu/optimizer_update.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>

#include "core/split_float.h"
#include "hwy/cache_control.h"
#include "kernels/cpu/block8_codec.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/reduction.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/optimizer_update.cpp"
#include "hwy/foreach_target.h"
#include "kernels/cpu/master-inl.h"
#include "kernels/cpu/optimizer_parts.h"
#include "kernels/cpu/squares-inl.h"
#include "kernels/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

/// Converts 16-bit elements in memory to fp32 in a block, and back.
void widen(DataType dtype, const void* from, std::int64_t first, std::int64_t count, std::int64_t ahead,
           float* to) {
  with_floating(dtype, [&](auto value) HWY_ATTR {
    const auto* elements = static_cast<const decltype(value)*>(from) + first;
    const hn::ScalableTag<float> d;
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
    std::int64_t i = 0;
    for (; i + 2 * lanes <= count; i += 2 * lanes) {
      hwy::Prefetch(reinterpret_cast<const char*>(elements + i) + ahead);
      store(d, load(d, elements + i), to + i);
      store(d, load(d, elements + i + lanes), to + i + lanes);
    }
    const hn::CappedTag<float, 1> one;
    for (; i < count; ++i) store(one, load(one, elements + i), to + i);
  });
}

/// With `streaming` the address is aligned to a whole vector, and the stores are non-temporal.
void narrow(DataType dtype, const float* from, void* to, std::int64_t first, std::int64_t count,
            bool streaming) {
  with_floating(dtype, [&](auto value) HWY_ATTR {
    auto* elements = static_cast<decltype(value)*>(to) + first;
    const hn::ScalableTag<float> d;
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
    std::int64_t i = 0;
    for (; i + 2 * lanes <= count; i += 2 * lanes) {
      store_pair(d, load(d, from + i), load(d, from + i + lanes), elements + i, streaming);
    }
    const hn::CappedTag<float, 1> one;
    for (; i < count; ++i) store(one, load(one, from + i), elements + i);
  });
}

/// Converts a state to fp32 in a block of the update, and back.
void read_state(const TensorView& state, std::int64_t first, std::int64_t count, std::int64_t ahead,
                float* to) {
  if (!is_block(state.dtype)) {
    widen(state.dtype, state.data, first, count, ahead, to);
    return;
  }
  const auto* blocks = static_cast<const std::byte*>(state.data) + bytes_of(state.dtype, first);
  decode_blocks8(state.dtype, blocks, count, ahead, to);
}

void write_state(const float* from, const TensorView& state, std::int64_t first, std::int64_t count) {
  if (!is_block(state.dtype)) {
    narrow(state.dtype, from, state.data, first, count, false);
    return;
  }
  encode_blocks8(state.dtype, from, count,
                 static_cast<std::byte*>(state.data) + bytes_of(state.dtype, first));
}

/// The number of elements before the first whose weight is aligned to a whole vector, as non-temporal stores
/// require.
std::int64_t elements_before_alignment(const TensorView& weight, std::int64_t first) {
  const hn::ScalableTag<float> d;
  const auto element = static_cast<std::uintptr_t>(size_of(weight.dtype));
  const auto vector = hn::Lanes(d) * sizeof(float);
  const auto address =
      reinterpret_cast<std::uintptr_t>(weight.data) + static_cast<std::uintptr_t>(first) * element;
  return static_cast<std::int64_t>((vector - address % vector) % vector / element);
}

/// Updates one block. fp32 data is updated in place, the rest through a copy in the core's own cache.
void update_block(const UpdatePart& part, std::int64_t first, std::int64_t count, bool streaming) {
  const RuleOperands& of = *part.operands;
  const UpdateRule& rule = *part.rule;
  const RulePhase phase = part.phase;
  HWY_ALIGN float gradient[block_elements], states[most_rule_states][block_elements];
  RuleBlock block;
  block.count = count;
  block.ratio = part.ratio;
  block.ahead = part.ahead;
  const bool states_first = rule.trust && rule.states_first;
  if (phase == RulePhase::finish && states_first) {
    // direction() does not use the gradient.
  } else if (of.gradient.dtype != DataType::float16) {
    block.gradient = static_cast<const std::byte*>(of.gradient.data) + first * size_of(of.gradient.dtype);
    block.gradient_type = of.gradient.dtype;
  } else {
    widen(of.gradient.dtype, of.gradient.data, first, count, part.ahead, gradient);
    block.gradient = gradient;
  }
  HWY_ALIGN float master[block_elements];
  const bool master_in_place = of.master.dtype == DataType::float32;
  if (master_in_place) {
    block.master = static_cast<float*>(of.master.data) + first;
  } else {
    read_master(of, first, count, master);
    block.master = master;
  }
  const bool reduced = !of.state.empty() && of.state[0].dtype != DataType::float32;
  const auto for_each_state = [&](const auto& call) HWY_ATTR {
    std::size_t next = 0;
    for (int slot = 0; slot < most_rule_states; ++slot) {
      if ((of.slots >> slot & 1) != 0) call(slot, of.state[next++]);
    }
  };
  const auto read_states = [&] HWY_ATTR {
    for_each_state([&](int slot, const TensorView& state) HWY_ATTR {
      if (reduced) {
        read_state(state, first, count, part.ahead, states[slot]);
        block.state[slot] = states[slot];
      } else {
        block.state[slot] = static_cast<float*>(state.data) + first;
      }
    });
  };
  read_states();
  HWY_ALIGN float direction[block_elements];
  // States that are stored in fp32 need not be read again for the direction.
  const bool at_once = phase == RulePhase::advance && states_first && !reduced;
  if (at_once) block.direction = direction;
  if (phase == RulePhase::advance && !reduced && master_in_place) {
    block.ahead = std::int64_t{sizeof(float)} * block_elements;  // prefetched while sums are computed
  }
  if (phase != RulePhase::advance || states_first) rule.block(part.arguments, of.slots, phase, block);
  const bool writes_states = phase == RulePhase::update || (phase == RulePhase::advance) == states_first;
  if (reduced && writes_states) {
    for_each_state([&](int slot, const TensorView& state)
                       HWY_ATTR { write_state(states[slot], state, first, count); });
  }
  if (phase == RulePhase::advance) {
    if (reduced && states_first) read_states();  // in their stored format, as the other phase reads them
    if (!at_once) {
      block.direction = direction;
      if (reduced) block.ahead = 0;
      rule.direct(part.arguments, of.slots, block);
    }
    const float* const summed[] = {block.master, direction};
    for (int i = 0; i < 2; ++i) {
      if (!add_squares(summed[i], count, part.sums[i])) part.sums[i].sum.add_infinity();
    }
  } else if (!master_in_place || (of.weight.data != nullptr && of.rounding != WeightRounding::nearest_even)) {
    write_master(part, first, count, block.master);
  } else if (of.weight.data != nullptr) {
    narrow(of.weight.dtype, block.master, of.weight.data, first, count, streaming);
  }
}

void update_part(const UpdatePart& part, std::int64_t first, std::int64_t count, bool streaming) {
  std::int64_t i = first;
  const std::int64_t end = first + count;
  if (streaming) {
    const std::int64_t before = elements_before_alignment(part.operands->weight, first);
    if (const auto& state = part.operands->state; !state.empty() && is_block(state[0].dtype)) {
      streaming = before == 0;  // weights are aligned at the blocks' begin
    } else {
      i = std::min(end, first + before);
      if (i > first) update_block(part, first, i - first, false);
    }
  }
  for (; i < end; i += block_elements) {
    update_block(part, i, std::min(block_elements, end - i), streaming);
  }
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tranche::kernels::cpu {

HWY_EXPORT(update_part);

namespace {

/// Calls update(segment, first, count) for the parts of all segments, divided among threads by position in
/// the range, whatever the segments' sizes. Each range ends by flushing its streamed weights to memory.
template <class Update>
void for_each_part(int threads, std::span<const UpdateSegment> segments, bool streaming,
                   const Update& update) {
  if (segments.empty()) return;
  const std::int64_t begin = segments.front().first;
  const std::int64_t total = segments.back().first + segments.back().count - begin;
  parallel_ranges(threads, total, parallel_grain, [&](std::int64_t range, std::int64_t elements) {
    const std::int64_t first = begin + range, end = first + elements;
    auto segment = std::partition_point(segments.begin(), segments.end(),
                                        [&](const UpdateSegment& s) { return s.first + s.count <= first; });
    for (; segment != segments.end() && segment->first < end; ++segment) {
      const std::int64_t from = std::max(first, segment->first);
      const std::int64_t to = std::min(end, segment->first + segment->count);
      if (from < to) update(*segment, from, to - from);
    }
    if (streaming) hwy::FlushStream();
  });
}

/// The weights of a short range stay in the caches for their reader.
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

void rule_update(int threads, const UpdateRule& rule, RulePhase phase, const RuleOperands& operands,
                 const UpdateTuning& tuning) {
  const bool streaming = phase != RulePhase::advance && streams(operands.segments, operands.weight);
  std::mutex adding;
  for_each_part(threads, operands.segments, streaming,
                [&](const UpdateSegment& segment, std::int64_t first, std::int64_t count) {
                  UpdatePart part;
                  part.rule = &rule;
                  part.phase = phase;
                  part.operands = &operands;
                  part.segment = &segment;
                  part.arguments = operands.arguments + segment.group * operands.stride;
                  part.ahead = tuning.prefetch_bytes;
                  if (!rule.applies(part.arguments)) return;
                  if (const RoundingKey* const key = operands.rounding_key) {
                    part.rounding_stream = detail::rounding_stream(key->seed, key->step, segment.tensor);
                  }
                  if (phase == RulePhase::finish) {
                    part.ratio =
                        rule.ratio(part.arguments, std::sqrt(segment.sums[0]), std::sqrt(segment.sums[1]));
                  }
                  HWY_DYNAMIC_DISPATCH(update_part)(part, first, count, streaming);
                  if (phase != RulePhase::advance) return;
                  const std::lock_guard lock(adding);
                  for (int i = 0; i < 2; ++i) segment.partial[i] += sum_of(part.sums[i]);
                });
}

}  // namespace tranche::kernels::cpu
#endif
