#include "core/block8.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace tranche::detail {

namespace {

/// The maps as bitsandbytes' create_dynamic_map() gives them, in its arithmetic: torch.linspace(0.1, 1) in
/// fp32 with one rounding an element from the nearer end, the middles of neighbours, times a power of ten.
template <bool with_sign>
constexpr std::array<float, 256> make_map() {
  std::array<float, 256> map{};
  constexpr std::size_t zero = static_cast<std::size_t>(block8_zero<with_sign>);
  std::size_t next = zero + 1;
  for (int decade = 0; decade < block8_decades; ++decade) {
    const int cells = block8_cells<with_sign>(decade);
    const float step = (1.0f - 0.1f) / static_cast<float>(cells);
    const auto border = [&](int i) {
      return i < (cells + 1) / 2 ? static_cast<float>(double{0.1f} + double{step} * i)
                                 : static_cast<float>(1.0 - double{step} * (cells - i));
    };
    for (int cell = 0; cell < cells; ++cell) {
      const float middle = (border(cell) + border(cell + 1)) / 2.0f;
      map[next++] = static_cast<float>(block8_end(decade)) * middle;
    }
  }
  map[next] = 1;
  for (std::size_t i = 0; with_sign && i < zero; ++i) map[i] = -map[2 * zero - i];
  return map;
}

constexpr std::array<float, 256> signed_map = make_map<true>(), unsigned_map = make_map<false>();

template <bool with_sign>
void encode(std::span<const float> values, std::byte* block) {
  std::uint32_t greatest = 0;
  for (const float value : values) greatest = std::max(greatest, block8_magnitude(value));
  const auto scale = std::bit_cast<float>(greatest);
  std::size_t i = 0;
  for (; i < values.size(); ++i) block[i] = static_cast<std::byte>(block8_code<with_sign>(values[i] / scale));
  for (; i < block8_elements; ++i) block[i] = static_cast<std::byte>(block8_zero<with_sign>);
  std::memcpy(block + block8_elements, &scale, sizeof(scale));
}

}  // namespace

std::span<const float, 256> block8_map(bool with_sign) {
  return with_sign ? signed_map : unsigned_map;
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
