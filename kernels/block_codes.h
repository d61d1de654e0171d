#pragma once
/// int8 blocks, element by element: arithmetic shared by all devices. Its bits are the same wherever
/// multiplies and adds are not contracted.

#include <bit>
#include <cstdint>
#include <limits>

namespace tranche::kernels {

struct BlockScale {
  float scale;    ///< from a code to its element
  float inverse;  ///< from an element to its code, before rounding
};

constexpr bool finite_magnitude(std::uint32_t bits) {
  return (bits & 0x7fffffffu) < 0x7f800000u;
}

/// `greatest` holds the bits of the block's greatest magnitude, where any NaN is greater than infinity.
constexpr BlockScale block_scale(std::uint32_t greatest) {
  if (!finite_magnitude(greatest)) return {std::numeric_limits<float>::quiet_NaN(), 0.0f};
  // 127 times the rounded scale of the largest fp32 number would overflow, so a smaller magnitude is used.
  const float magnitude = greatest == 0x7f7fffffu ? 0x1.fffffcp127f : std::bit_cast<float>(greatest);
  if (magnitude < 0x1p-119f) return {0.0f, 0.0f};  // its scale would lose bits, and its inverse overflow
  return {magnitude / 127.0f, 127.0f / magnitude};
}

/// Adding and subtracting this rounds magnitudes below 2^22 to the nearest integer, ties to even.
inline constexpr float rounds_to_integer = 0x1.8p23f;

/// The code of an element of a block whose elements are all finite.
constexpr int block_code(float value, float inverse) {
  return static_cast<int>((value * inverse + rounds_to_integer) - rounds_to_integer);
}
/// The same for a block that holds an infinity or NaN.
constexpr int broken_block_code(float value) {
  return finite_magnitude(std::bit_cast<std::uint32_t>(value)) ? 0 : 1;
}

constexpr float block_value(int code, float scale) {
  return code == 0 ? 0.0f : static_cast<float>(code) * scale;
}

}  // namespace tranche::kernels
