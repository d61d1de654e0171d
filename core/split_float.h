#pragma once
/// fp32 numbers in fewer bits: a bf16 number with 16 more bits that restore the rest, or a bf16 number that
/// is rounded at random. The arithmetic is constexpr, so any device may run it.

#include <bit>
#include <cstdint>

#include "core/philox.h"
#include "tranche/core/dtype.h"

namespace tranche::detail {

/// `high` is the nearest bf16 number, with ties away from zero, and `low` is the lower 16 bits. Rounding to
/// even would lose numbers: two that lie half a unit above and below the same even number would have equal
/// parts.
struct SplitFloat {
  bfloat16 high;
  std::uint16_t low;
  friend bool operator==(SplitFloat, SplitFloat) = default;
};

constexpr bool is_nan_pattern(std::uint32_t bits) {
  return (bits & 0x7fffffffu) > 0x7f800000u;
}

/// NaNs become quiet and keep only the payload's upper bits.
constexpr SplitFloat split_float(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (is_nan_pattern(bits)) return {{static_cast<std::uint16_t>(bits >> 16 | 0x0040u)}, 0};
  return {{static_cast<std::uint16_t>((bits + 0x8000u) >> 16)}, static_cast<std::uint16_t>(bits)};
}

/// The inverse of split_float, bit for bit except for NaNs. `low`, read as a signed number, is the distance
/// from `high`.
constexpr float join_float(SplitFloat parts) {
  const auto distance = static_cast<std::uint32_t>(static_cast<std::int16_t>(parts.low));
  return std::bit_cast<float>((static_cast<std::uint32_t>(parts.high.bits) << 16) + distance);
}

/// Rounds away from zero with a probability equal to the fraction of a bf16 unit that is cut off, so that the
/// mean over many draws is the value itself. `draw` is one of 2^16 equally likely numbers. A finite value
/// stays finite.
constexpr bfloat16 round_stochastically(float value, std::uint32_t draw) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (is_nan_pattern(bits)) return to_bfloat16(value);
  const std::uint32_t rounded = bits + draw;
  const bool beyond = (rounded & 0x7fffffffu) >= 0x7f800000u;
  return {static_cast<std::uint16_t>((beyond ? bits : rounded) >> 16)};
}

/// The number of a tensor's elements that share one block of random_block(): element 8 * block + i uses the
/// lower half of word i / 2 if i is even, else the upper half.
inline constexpr std::int64_t rounding_block = 8;

/// The stream of draws for a tensor's weights in a step. It depends on nothing else, so the bits do not
/// depend on how state is sharded. Streams never meet while tensors stay below 2^24 and steps below 2^40.
constexpr RandomKey rounding_stream(std::uint64_t seed, std::int64_t step, std::uint64_t tensor) {
  return {seed, RandomPurpose::rounding, static_cast<std::uint64_t>(step) << 24 | tensor};
}

constexpr std::uint32_t rounding_draw(const std::array<std::uint32_t, 4>& block, std::int64_t element) {
  const auto i = static_cast<std::uint32_t>(element % rounding_block);
  return block[i / 2] >> (i % 2 * 16) & 0xffffu;
}

}  // namespace tranche::detail
