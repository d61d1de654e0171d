#include "core/block8.h"

#include <algorithm>
#include <cstring>

namespace tranche::detail {

namespace {

template <bool with_sign>
void encode(std::span<const float> values, std::byte* block) {
  std::uint32_t greatest = 0;
  for (const float value : values) greatest = std::max(greatest, block8_magnitude(value));
  const auto scale = std::bit_cast<float>(greatest);
  const Block8Shares share = block8_shares(scale);
  std::size_t i = 0;
  for (; i < values.size(); ++i) block[i] = static_cast<std::byte>(block8_code<with_sign>(share(values[i])));
  for (; i < block8_elements; ++i) block[i] = static_cast<std::byte>(block8_zero<with_sign>);
  std::memcpy(block + block8_elements, &scale, sizeof(scale));
}

}  // namespace

std::span<const float, 256> block8_map(bool with_sign) {
  static constexpr Block8Map maps[] = {make_block8_map<false>(), make_block8_map<true>()};
  return maps[with_sign ? 1 : 0].values;
}

void encode_block8(DataType dtype, std::span<const float> values, std::byte* block) {
  dtype == DataType::block8 ? encode<true>(values, block) : encode<false>(values, block);
}

void decode_block8(DataType dtype, const std::byte* block, std::span<float> values) {
  const std::span<const float, 256> map = block8_map(dtype == DataType::block8);
  float scale;
  std::memcpy(&scale, block + block8_elements, sizeof(scale));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = map[std::to_integer<std::size_t>(block[i])] * scale;
  }
}

void encode_blocks8(DataType dtype, std::span<const float> values, std::byte* blocks) {
  for (; !values.empty(); blocks += block8_bytes) {
    const std::size_t count = std::min(values.size(), static_cast<std::size_t>(block8_elements));
    encode_block8(dtype, values.first(count), blocks);
    values = values.subspan(count);
  }
}

void decode_blocks8(DataType dtype, const std::byte* blocks, std::span<float> values) {
  for (; !values.empty(); blocks += block8_bytes) {
    const std::size_t count = std::min(values.size(), static_cast<std::size_t>(block8_elements));
    decode_block8(dtype, blocks, values.first(count));
    values = values.subspan(count);
  }
}

}  // namespace tranche::detail
