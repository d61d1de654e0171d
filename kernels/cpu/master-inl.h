// Converts master weights of an optimizer's update in formats other than fp32
// (tranche/kernels/master_weights.h) to fp32 and back. Included once per instruction set by
// optimizer_update.cpp; the arithmetic is that of core/split_float.h.
#if defined(TRANCHE_KERNELS_CPU_MASTER_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TRANCHE_KERNELS_CPU_MASTER_INL_H
#undef TRANCHE_KERNELS_CPU_MASTER_INL_H
#else
#define TRANCHE_KERNELS_CPU_MASTER_INL_H
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "core/split_float.h"
#include "kernels/cpu/optimizer_parts.h"
#include "kernels/cpu/philox-inl.h"
#include "kernels/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Reads elements [first, first + count) of the range as fp32; the master is not fp32.
HWY_INLINE void read_master(const RuleOperands& of, std::int64_t first, std::int64_t count, float* to) {
  if (of.master.dtype == DataType::bfloat16) {
    const auto* from = static_cast<const bfloat16*>(of.master.data) + first;
    for_each_vector(count, [&](auto d, std::int64_t i) HWY_ATTR { store(d, load(d, from + i), to + i); });
    return;
  }
  const auto* high = static_cast<const std::uint16_t*>(of.weight.data) + first;
  const auto* low = static_cast<const std::uint16_t*>(of.master.data) + first;
  for_each_vector(count, [&](auto d, std::int64_t i) HWY_ATTR {
    const Bits<decltype(d)> u;
    // The lower half is read as a signed number.
    const hn::RebindToSigned<decltype(d)> integers;
    const auto distance = hn::ShiftRight<16>(hn::BitCast(integers, hn::ShiftLeft<16>(load_bits(d, low + i))));
    const auto bits = hn::Add(hn::ShiftLeft<16>(load_bits(d, high + i)), hn::BitCast(u, distance));
    store(d, hn::BitCast(d, bits), to + i);
  });
}

/// The bf16 patterns, zero-extended, of values rounded to nearest with ties away from zero.
template <class D>
HWY_INLINE hn::VFromD<Bits<D>> half_away(D, hn::VFromD<D> value) {
  const Bits<D> u;
  const auto bits = hn::BitCast(u, value);
  const auto quiet = hn::Or(bits, hn::Set(u, 0x00400000u));
  const auto rounded = hn::Add(bits, hn::Set(u, 0x8000u));
  return hn::ShiftRight<16>(hn::IfThenElse(hn::RebindMask(u, hn::IsNaN(value)), quiet, rounded));
}

/// Rounds stochastically to bf16 patterns; `draws` are 16 bits for each element.
HWY_INLINE void round_at_random(const float* from, std::int64_t count, const std::uint16_t* draws,
                                std::uint16_t* to) {
  for_each_vector(count, [&](auto d, std::int64_t i) HWY_ATTR {
    const Bits<decltype(d)> u;
    const auto value = load(d, from + i);
    const auto bits = hn::BitCast(u, value);
    const auto rounded = hn::Add(bits, load_bits(d, draws + i));
    const auto magnitude = hn::And(rounded, hn::Set(u, 0x7fffffffu));
    auto result = hn::IfThenElse(above(u, magnitude, hn::Set(u, 0x7f7fffffu)), bits, rounded);
    const auto quiet = hn::Or(bits, hn::Set(u, 0x00400000u));
    result = hn::IfThenElse(hn::RebindMask(u, hn::IsNaN(value)), quiet, result);
    store_bits(d, hn::ShiftRight<16>(result), to + i);
  });
}

/// The draws of core's rounding_draw() for elements [first, first + count) of the tensor; count is at most
/// block_elements.
HWY_INLINE void rounding_draws(const RandomKey& stream, std::int64_t first, std::int64_t count,
                               std::uint32_t* words) {
  const std::int64_t begin = first / detail::rounding_block;
  const std::int64_t blocks = (first + count - 1) / detail::rounding_block - begin + 1;
  const hn::ScalableTag<std::uint32_t> u;
  std::int64_t done = for_random_blocks(stream, static_cast<std::uint64_t>(begin), blocks,
                                        [&](auto draws, std::int64_t i)
                                            HWY_ATTR { hn::StoreU(hn::BitCast(u, draws), u, words + i); });
  for (; done < blocks; ++done) {
    const auto block = detail::unchecked_random_block(stream, static_cast<std::uint64_t>(begin + done));
    std::copy(block.begin(), block.end(), words + 4 * done);
  }
}

/// Writes the new values of elements [first, first + count) of the range, rounded as the operands request: a
/// master that is not fp32, and the weight.
HWY_INLINE void write_master(const UpdatePart& part, std::int64_t first, std::int64_t count,
                             const float* from) {
  const RuleOperands& of = *part.operands;
  auto* weight = static_cast<std::uint16_t*>(of.weight.data);
  if (weight != nullptr) weight += first;
  auto* master = static_cast<std::uint16_t*>(of.master.data) + first;
  if (of.rounding == WeightRounding::half_away) {
    const bool halves = of.master.dtype == DataType::uint16;
    for_each_vector(count, [&](auto d, std::int64_t i) HWY_ATTR {
      const Bits<decltype(d)> u;
      const auto value = load(d, from + i);
      store_bits(d, half_away(d, value), weight + i);
      if (!halves) return;
      const auto low = hn::And(hn::BitCast(u, value), hn::Set(u, 0xffffu));
      store_bits(d, hn::IfThenZeroElse(hn::RebindMask(u, hn::IsNaN(value)), low), master + i);
    });
    return;
  }
  if (of.rounding == WeightRounding::stochastic) {
    HWY_ALIGN std::uint32_t words[block_elements / 2 + 4];
    const std::int64_t element = part.segment->first_element + first - part.segment->first;
    rounding_draws(part.rounding_stream, element, count, words);
    // The lower half of a word comes first in memory.
    std::uint16_t draws[2 * std::size(words)];
    std::memcpy(draws, words, sizeof(draws));
    round_at_random(from, count, draws + element % detail::rounding_block, master);
  } else {
    for_each_vector(count, [&](auto d, std::int64_t i) HWY_ATTR {
      store_bits(d, bits_of(d, load(d, from + i), bfloat16()), master + i);
    });
  }
  if (weight != nullptr) std::copy(master, master + count, weight);
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
