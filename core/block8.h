#pragma once
/// The 8-bit block format of optimizer states: bitsandbytes' dynamic maps (Dettmers et al., 2022) over blocks
/// of 256 elements. A block is 256 codes and behind them its scale, the greatest magnitude, in fp32; so a
/// block is found by its position alone, and is copied whole. An element is map[code] * scale. The arithmetic
/// of a code is the same on every device.
///
/// A map has seven decades; the one below 1 has 64 equal cells (unsigned: 128), and each one below half as
/// many as the one above. A value is the middle of its cell. 0 and 1 are values too.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "tranche/core/dtype.h"

namespace tranche::detail {

inline constexpr int block8_decades = 7;

/// Cells of a decade, of which 0 is the smallest numbers'.
template <bool with_sign>
constexpr int block8_cells(int decade) {
  return (with_sign ? 1 : 2) << decade;
}

/// 10 to the power of decade - 6: where a decade ends.
constexpr double block8_end(int decade) {
  double end = 1;
  for (int i = decade; i < block8_decades - 1; ++i) end /= 10;
  return end;
}

/// The least magnitude that is nearest to a value of the decade; of decade 7, to 1.
template <bool with_sign, int decade>
constexpr float block8_from() {
  const auto width = [](int of) { return 0.9 * block8_end(of) / block8_cells<with_sign>(of); };
  if constexpr (decade == 0) {
    return static_cast<float>((block8_end(0) / 10 + width(0) / 2) / 2);
  } else if constexpr (decade == block8_decades) {
    return static_cast<float>(1 - width(decade - 1) / 4);
  } else {
    return static_cast<float>(block8_end(decade - 1) + width(decade - 1));
  }
}

template <bool with_sign, int decade>
constexpr void choose_block8_decade(float x, float& slope, float& cells) {
  constexpr float from = block8_from<with_sign, decade>();
  constexpr auto own_cells = static_cast<float>(block8_cells<with_sign>(decade));
  constexpr auto own_slope = static_cast<float>(block8_cells<with_sign>(decade) / (0.9 * block8_end(decade)));
  slope = x >= from ? own_slope : slope;
  cells = x >= from ? own_cells : cells;
}

/// The share of its block's scale that an element is, in [-1, 1]: by multiplication with the scale's inverse,
/// as in bitsandbytes. That of a subnormal scale could be infinite, so `lift` makes scale and element normal.
struct Block8Shares {
  float lift, inverse;
  constexpr float operator()(float element) const { return element * lift * inverse; }
};
constexpr Block8Shares block8_shares(float scale) {
  const float lift = scale < 0x1p-126f ? 0x1p24f : 1.0f;
  return {lift, 1.0f / (scale * lift)};
}

/// The code whose value is nearest to x, an element's share; of two as near the one further from 0. A NaN
/// (all of a block whose scale is 0) has the code of 0, as does what is negative without sign.
template <bool with_sign>
constexpr std::int32_t block8_code(float x) {
  const float magnitude = with_sign && x < 0 ? -x : x;
  float slope = static_cast<float>(block8_cells<with_sign>(0) / (0.9 * block8_end(0)));
  auto cells = static_cast<float>(block8_cells<with_sign>(0));
  choose_block8_decade<with_sign, 1>(magnitude, slope, cells);
  choose_block8_decade<with_sign, 2>(magnitude, slope, cells);
  choose_block8_decade<with_sign, 3>(magnitude, slope, cells);
  choose_block8_decade<with_sign, 4>(magnitude, slope, cells);
  choose_block8_decade<with_sign, 5>(magnitude, slope, cells);
  choose_block8_decade<with_sign, 6>(magnitude, slope, cells);
  // Values that are greater than 0 count from 1; a decade begins with as many as it has cells, so that
  // (magnitude - end / 10) * slope cells lie before the magnitude's: end / 10 * slope = cells / 9.
  constexpr float before = 8.0f / 9;
  const float cell = magnitude * slope + cells * before;
  const float last = cells + cells - 1;
  std::int32_t number = static_cast<std::int32_t>(cell < last ? cell : last);  // `last` for a NaN
  if (!with_sign) number -= 1;
  number = magnitude >= block8_from<with_sign, 0>() ? number : 0;
  number = magnitude >= block8_from<with_sign, block8_decades>() ? (with_sign ? 128 : 255) : number;
  if (!with_sign) return number;
  const std::int32_t below = 127 - number;
  return x < 0 ? (below < 0 ? 0 : below) : 127 + number;
}

/// The code of 0.
template <bool with_sign>
inline constexpr std::int32_t block8_zero = with_sign ? 127 : 0;

/// The 256 values of a map, ascending.
struct Block8Map {
  float values[256];
};
/// As bitsandbytes' create_dynamic_map() gives them, in its arithmetic: torch.linspace(0.1, 1) in fp32 with
/// one rounding an element from the nearer end, the middles of neighbours, times a power of ten.
template <bool with_sign>
constexpr Block8Map make_block8_map() {
  Block8Map map{};
  constexpr int zero = block8_zero<with_sign>;
  int next = zero + 1;
  for (int decade = 0; decade < block8_decades; ++decade) {
    const int cells = block8_cells<with_sign>(decade);
    const float step = (1.0f - 0.1f) / static_cast<float>(cells);
    const auto border = [&](int i) {
      return i < (cells + 1) / 2 ? static_cast<float>(double{0.1f} + double{step} * i)
                                 : static_cast<float>(1.0 - double{step} * (cells - i));
    };
    for (int cell = 0; cell < cells; ++cell) {
      const float middle = (border(cell) + border(cell + 1)) / 2.0f;
      map.values[next++] = static_cast<float>(block8_end(decade)) * middle;
    }
  }
  map.values[next] = 1;
  for (int i = 0; with_sign && i < zero; ++i) map.values[i] = -map.values[2 * zero - i];
  return map;
}
std::span<const float, 256> block8_map(bool with_sign);

/// Greatest magnitude of up to 256 elements, as bits; a NaN is greater than any number, so that a block with
/// one is of NaNs alone.
constexpr std::uint32_t block8_magnitude(float value) {
  return std::bit_cast<std::uint32_t>(value) & 0x7fffffffu;
}

/// Encodes a block of up to 256 elements; the codes of those that are missing are that of 0. `dtype` is
/// block8 or block8_unsigned.
void encode_block8(DataType dtype, std::span<const float> values, std::byte* block);
/// The first elements of a block, as many as asked for.
void decode_block8(DataType dtype, const std::byte* block, std::span<float> values);

/// Elements [0, values.size()) that begin with a block, and the other way; the last block may be of fewer.
void encode_blocks8(DataType dtype, std::span<const float> values, std::byte* blocks);
void decode_blocks8(DataType dtype, const std::byte* blocks, std::span<float> values);

}  // namespace tranche::detail
