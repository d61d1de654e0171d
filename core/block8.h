#pragma once
/// The 8-bit block format of optimizer states: bitsandbytes' dynamic maps (Dettmers et al., 2022) over blocks
/// of 256 elements. A block holds 256 codes followed by its scale, the greatest magnitude, in fp32; so its
/// address follows from its index alone, and it is copied as a whole. An element is map[code] * scale. The
/// arithmetic of a code is the same on every device.
///
/// A map has seven decades. The highest one, which ends at 1, has 64 equal cells (unsigned: 128), and every
/// lower one half as many as the next higher. The middles of cells are the map's values, and so are 0 and 1.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "tranche/core/dtype.h"

namespace tranche::detail {

inline constexpr int block8_decades = 7;

/// The number of cells in a decade. Decade 0 holds the smallest magnitudes.
template <bool with_sign>
constexpr int block8_cells(int decade) {
  return (with_sign ? 1 : 2) << decade;
}

/// The upper end of a decade: 10 to the power of decade - 6.
constexpr double block8_end(int decade) {
  double end = 1;
  for (int i = decade; i < block8_decades - 1; ++i) end /= 10;
  return end;
}

/// The least magnitude whose nearest value lies in the decade; for decade 7, the least that is nearest to 1.
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

/// Divides an element by its block's scale, to a share in [-1, 1]. It multiplies by the scale's inverse, as
/// bitsandbytes does. The inverse of a subnormal scale could be infinite, so `lift` makes scale and element
/// normal.
struct Block8Shares {
  float lift, inverse;
  constexpr float operator()(float element) const { return element * lift * inverse; }
};
constexpr Block8Shares block8_shares(float scale) {
  const float lift = scale < 0x1p-126f ? 0x1p24f : 1.0f;
  return {lift, 1.0f / (scale * lift)};
}

/// The code whose value is nearest to x, an element's share; on a tie, the one further from 0. A NaN (every
/// share of a block whose scale is 0) gets the code of 0, and so does a negative share in the unsigned map.
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
  // A decade's cells are numbered from `cells` on (unsigned: from cells - 1, subtracted below), so the number
  // of a magnitude is cells + (magnitude - end / 10) * slope, in which end / 10 * slope is cells / 9.
  constexpr float before = 8.0f / 9;
  const float cell = magnitude * slope + cells * before;
  const float last = cells + cells - 1;
  std::int32_t number = static_cast<std::int32_t>(cell < last ? cell : last);  // a NaN gives `last`
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
/// Computes bitsandbytes' create_dynamic_map() with the same rounding: torch.linspace(0.1, 1) in fp32 with
/// one rounding per element from the nearer end, the middles of neighbours, times a power of ten.
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

/// The greatest magnitude of up to 256 elements, as bits. A NaN compares greater than any number, so every
/// element of a block with a NaN decodes to NaN.
constexpr std::uint32_t block8_magnitude(float value) {
  return std::bit_cast<std::uint32_t>(value) & 0x7fffffffu;
}

/// Encodes a block of up to 256 elements; the codes of missing elements are the code of 0. `dtype` is block8
/// or block8_unsigned.
void encode_block8(DataType dtype, std::span<const float> values, std::byte* block);
/// Decodes the first values.size() elements of a block.
void decode_block8(DataType dtype, const std::byte* block, std::span<float> values);

/// Encodes, or decodes, elements [0, values.size()) that begin with a block; the last block may hold fewer
/// than 256.
void encode_blocks8(DataType dtype, std::span<const float> values, std::byte* blocks);
void decode_blocks8(DataType dtype, const std::byte* blocks, std::span<float> values);

}  // namespace tranche::detail
