#pragma once
/// Element types and the 16-bit conversions. Narrowing rounds to nearest even, keeps infinities and signed
/// zeros, quietens NaNs (the payload's top bits survive) and flushes nothing: fp16 subnormals are exact.
/// Widening is exact; fp16 NaNs come out quiet, as hardware does it, bf16 ones keep every bit. Conversions
/// are inline and without branches, so that compilers vectorise loops over them.

#include <bit>
#include <cstdint>
#include <string_view>

namespace tranche {

/// block8 is a format of optimizer states. A block of 256 elements holds 256 codes and an fp32 scale; the
/// elements of block8_unsigned are not negative. A tensor begins at the start of a block, and only its last
/// block may hold fewer elements.
enum class DataType : std::uint8_t {
  float32,
  bfloat16,
  float16,
  float64,
  int32,
  int64,
  uint16,
  uint8,
  block8,
  block8_unsigned
};

inline constexpr std::int64_t block8_elements = 256, block8_bytes = 260;
constexpr bool is_block(DataType dtype) {
  return dtype == DataType::block8 || dtype == DataType::block8_unsigned;
}
/// The number of elements that are stored together: 256 for block formats, 1 for all others.
constexpr std::int64_t block_elements_of(DataType dtype) {
  return is_block(dtype) ? block8_elements : 1;
}

/// Throws LogicError, because an element of a block has no size of its own.
[[noreturn]] void refuse_size_of(DataType dtype);

/// Bytes of one element. Throws LogicError for block formats.
constexpr std::int64_t size_of(DataType dtype) {
  switch (dtype) {
    case DataType::float64:
    case DataType::int64:
      return 8;
    case DataType::float32:
    case DataType::int32:
      return 4;
    case DataType::bfloat16:
    case DataType::float16:
    case DataType::uint16:
      return 2;
    case DataType::uint8:
      return 1;
    case DataType::block8:
    case DataType::block8_unsigned:
      break;
  }
  refuse_size_of(dtype);
}

/// Bytes of so many elements, rounded up to whole blocks. It is also the byte offset of element `elements`,
/// if a block begins there.
constexpr std::int64_t bytes_of(DataType dtype, std::int64_t elements) {
  if (is_block(dtype)) return (elements + block8_elements - 1) / block8_elements * block8_bytes;
  return elements * size_of(dtype);
}

/// The name in configurations: "fp32", "bf16", "fp16", "fp64", "int32", "int64", "uint16", "uint8", "block8",
/// "block8_unsigned".
std::string_view name_of(DataType dtype);
/// The inverse of name_of, except for block formats; it also accepts "float32", "bfloat16", "float16", "half"
/// and "float64". Throws ConfigurationError naming the accepted spellings.
DataType parse_data_type(std::string_view text);
constexpr bool is_floating(DataType dtype) {
  return dtype == DataType::float32 || dtype == DataType::bfloat16 || dtype == DataType::float16 ||
         dtype == DataType::float64;
}

/// Storage of a bfloat16 number; arithmetic is always done in fp32.
struct bfloat16 {
  std::uint16_t bits = 0;
  friend bool operator==(bfloat16, bfloat16) = default;
};
/// Storage of an IEEE binary16 number; arithmetic is always done in fp32.
struct float16 {
  std::uint16_t bits = 0;
  friend bool operator==(float16, float16) = default;
};

constexpr float to_float(float value) {
  return value;
}
constexpr float to_float(bfloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}
constexpr float to_float(float16 value) {
  const std::uint32_t sign = (value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = (value.bits & 0x7fffu) << 13;
  // The exponent is rebased from 15 to 127. A subnormal m * 2^-24 is read as 2^-14 + m * 2^-24, and 2^-14 is
  // then subtracted.
  const float small = std::bit_cast<float>(magnitude + 0x38800000u) - 0x1p-14f;
  std::uint32_t bits = magnitude + 0x38000000u;
  if (magnitude >= 0x0f800000u) bits = magnitude + 0x70000000u;
  if (magnitude > 0x0f800000u) bits |= 0x00400000u;
  // The mask is made from the difference's sign, because compilers turn a comparison back into a branch
  // around the subtraction.
  const std::uint32_t is_small = 0u - ((magnitude - 0x00800000u) >> 31);
  bits = (std::bit_cast<std::uint32_t>(small) & is_small) | (bits & ~is_small);
  return std::bit_cast<float>(bits | sign);
}

/// Rounds to nearest even. Values beyond the largest bfloat16 become infinity as IEEE asks.
constexpr bfloat16 to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((bits >> 16) | 0x0040u)};
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
/// Rounds to nearest even, subnormals included. Magnitudes from 65520 (65504 + half a unit) become infinity.
constexpr float16 to_float16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  // Below 2^-14 the unit in the last place is 2^-24. It is also that of fp32 numbers from 0.5 on, so one
  // addition rounds.
  const std::uint32_t is_small = 0u - ((magnitude - 0x38800000u) >> 31);
  const float small = std::bit_cast<float>(magnitude & is_small) + 0.5f;
  // Magnitudes from 65520 on, infinity and NaN included, round to the bit pattern of infinity.
  const std::uint32_t capped = magnitude < 0x477ff000u ? magnitude : 0x477ff000u;
  std::uint32_t half = (capped - 0x38000000u + 0x0fffu + ((capped >> 13) & 1u)) >> 13;
  half = ((std::bit_cast<std::uint32_t>(small) - 0x3f000000u) & is_small) | (half & ~is_small);
  const std::uint32_t is_nan = 0u - ((0x7f800000u - magnitude) >> 31);
  half |= is_nan & (0x0200u | ((magnitude >> 13) & 0x03ffu));
  return {static_cast<std::uint16_t>(half | ((bits >> 16) & 0x8000u))};
}

/// The DataType of a C++ storage type: data_type_of<float>() and so on.
template <typename T>
constexpr DataType data_type_of();
template <>
constexpr DataType data_type_of<float>() {
  return DataType::float32;
}
template <>
constexpr DataType data_type_of<double>() {
  return DataType::float64;
}
template <>
constexpr DataType data_type_of<bfloat16>() {
  return DataType::bfloat16;
}
template <>
constexpr DataType data_type_of<float16>() {
  return DataType::float16;
}
template <>
constexpr DataType data_type_of<std::int32_t>() {
  return DataType::int32;
}
template <>
constexpr DataType data_type_of<std::int64_t>() {
  return DataType::int64;
}
template <>
constexpr DataType data_type_of<std::uint16_t>() {
  return DataType::uint16;
}
template <>
constexpr DataType data_type_of<std::uint8_t>() {
  return DataType::uint8;
}

/// Converts from fp32 to a storage type.
template <typename T>
constexpr T from_float(float value);
template <>
constexpr float from_float<float>(float value) {
  return value;
}
template <>
constexpr bfloat16 from_float<bfloat16>(float value) {
  return to_bfloat16(value);
}
template <>
constexpr float16 from_float<float16>(float value) {
  return to_float16(value);
}

}  // namespace tranche
