#include "core/block8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "error_text.h"
#include "golden_block8.h"
#include "tranche/core/error.h"
#include "tranche/core/tensor_view.h"

namespace tranche::test {
namespace {

using namespace detail;

constexpr DataType block_types[] = {DataType::block8, DataType::block8_unsigned};

/// Numbers in (-1, 1) from SplitMix64, the same as in scripts/golden_draw.py, scaled over many powers of two.
std::vector<float> drawn_values(bool with_sign) {
  std::uint64_t state = with_sign ? 8 : 9;
  std::vector<float> values;
  for (int i = 0; i < golden_block8_draws; ++i) {
    state += 0x9e3779b97f4a7c15u;
    std::uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    const float x = static_cast<float>(static_cast<double>(z >> 40) * 0x1p-23 - 1.0);
    values.push_back(std::ldexp(with_sign ? x : std::abs(x), -(i % 24) - i / 256 % 11));
  }
  return values;
}

/// The first of the map's values that are nearest to x, computed in fp32.
int nearest(std::span<const float, 256> map, float x) {
  const auto above = static_cast<int>(std::lower_bound(map.begin(), map.end(), x) - map.begin());
  int best = std::max(0, above - 2);
  for (int i = best; i <= std::min(255, above + 1); ++i) {
    const auto distance = [&](int of) { return std::abs(x - map[static_cast<std::size_t>(of)]); };
    if (distance(i) < distance(best)) best = i;
  }
  return best;
}

TEST(Block8, MapsAreThoseOfBitsandbytes) {
  EXPECT_EQ(std::memcmp(block8_map(true).data(), golden_signed_map, sizeof(golden_signed_map)), 0);
  EXPECT_EQ(std::memcmp(block8_map(false).data(), golden_unsigned_map, sizeof(golden_unsigned_map)), 0);
  for (int code = 0; code < 256; ++code) {
    EXPECT_EQ(block8_code<true>(golden_signed_map[code]), code);
    EXPECT_EQ(block8_code<false>(golden_unsigned_map[code]), code);
  }
}

// The search below is that of bitsandbytes, as the hash of its codes shows. The library's arithmetic gives
// other codes only for numbers exactly between two values.
TEST(Block8, CodesAreThoseOfBitsandbytes) {
  for (const DataType dtype : block_types) {
    const bool with_sign = dtype == DataType::block8;
    const std::vector<float> values = drawn_values(with_sign);
    std::vector<std::byte> blocks(static_cast<std::size_t>(bytes_of(dtype, golden_block8_draws)));
    encode_blocks8(dtype, values, blocks.data());
    std::uint64_t hash = 0xcbf29ce484222325u;
    int differing = 0, further = 0;
    for (std::size_t b = 0; b < values.size() / block8_elements; ++b) {
      const float* const of_block = values.data() + b * block8_elements;
      float greatest = 0, scale;
      for (int i = 0; i < block8_elements; ++i) greatest = std::max(greatest, std::abs(of_block[i]));
      const std::byte* const block = blocks.data() + b * block8_bytes;
      std::memcpy(&scale, block + block8_elements, sizeof(scale));
      ASSERT_EQ(scale, greatest);
      for (int i = 0; i < block8_elements; ++i) {
        const int wanted = nearest(block8_map(with_sign), of_block[i] * (1 / greatest));
        hash = (hash ^ static_cast<std::uint64_t>(wanted)) * 0x100000001b3u;
        const int apart = std::abs(wanted - std::to_integer<int>(block[i]));
        differing += apart > 0 ? 1 : 0;
        further += apart > 1 ? 1 : 0;
      }
    }
    EXPECT_EQ(hash, with_sign ? golden_signed_codes : golden_unsigned_codes);
    EXPECT_LE(differing, golden_block8_draws / 10000) << name_of(dtype);
    EXPECT_EQ(further, 0) << name_of(dtype);
  }
}

TEST(Block8, GivesBackWhatItHoldsAndIsStable) {
  for (const DataType dtype : block_types) {
    std::vector<float> values = drawn_values(dtype == DataType::block8);
    values.resize(3 * block8_elements + 7);
    std::vector<std::byte> blocks(static_cast<std::size_t>(bytes_of(dtype, 3 * block8_elements + 7)));
    ASSERT_EQ(blocks.size(), 4u * block8_bytes);
    encode_blocks8(dtype, values, blocks.data());
    std::vector<float> back(values.size());
    decode_blocks8(dtype, blocks.data(), back);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::size_t first = i / block8_elements * block8_elements;
      float scale = 0;
      for (std::size_t k = first; k < std::min(first + block8_elements, values.size()); ++k) {
        scale = std::max(scale, std::abs(values[k]));
      }
      // The bound is half the distance to the farther neighbour of the value. Numbers below -0.993 have no
      // such neighbour.
      const std::span<const float, 256> map = block8_map(dtype == DataType::block8);
      const auto code = std::to_integer<std::size_t>(blocks[i / block8_elements * block8_bytes + i - first]);
      const float left = code == 0 ? 0.0141f : map[code] - map[code - 1];
      const float right = code == 255 ? 0.0f : map[code + 1] - map[code];
      EXPECT_NEAR(back[i], values[i], 0.500001f * scale * std::max(left, right)) << i;
    }
    std::vector<std::byte> again(blocks.size());
    encode_blocks8(dtype, back, again.data());
    // An exception is -1, because the signed map's smallest value is -0.993.
    int differing = 0;
    for (std::size_t i = 0; i < again.size(); ++i) differing += again[i] != blocks[i] ? 1 : 0;
    if (dtype == DataType::block8_unsigned) {
      EXPECT_EQ(differing, 0);
    }
  }
}

TEST(Block8, ZerosSubnormalsAndWhatIsNotFinite) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (const DataType dtype : block_types) {
    std::array<std::byte, block8_bytes> block{};
    std::array<float, 5> back{};
    encode_block8(dtype, std::array{0.0f, -0.0f, 0.0f, 0.0f, 0.0f}, block.data());
    for (int i = 0; i < block8_elements; ++i) EXPECT_EQ(block[0], block[static_cast<std::size_t>(i)]);
    decode_block8(dtype, block.data(), back);
    for (const float value : back) EXPECT_EQ(std::bit_cast<std::uint32_t>(value), 0u);
    encode_block8(dtype, std::array{0x1p-149f, 0x1p-145f, 0.0f}, block.data());
    decode_block8(dtype, block.data(), back);
    EXPECT_EQ(back[0], 0x1p-149f);
    EXPECT_EQ(back[1], 0x1p-145f);
    EXPECT_EQ(back[2], 0);
    // Infinities and NaN are preserved.
    for (const float bad : {infinity, std::numeric_limits<float>::quiet_NaN()}) {
      encode_block8(dtype, std::array{1.0f, bad, 0.5f}, block.data());
      decode_block8(dtype, block.data(), back);
      EXPECT_FALSE(std::isfinite(back[1]));
    }
  }
  std::array<std::byte, block8_bytes> block{};
  std::array<float, 2> back{};
  encode_block8(DataType::block8, std::array{-1.0f, 0.25f}, block.data());
  decode_block8(DataType::block8, block.data(), back);
  EXPECT_NEAR(back[0], -0.993f, 1e-3);
  encode_block8(DataType::block8_unsigned, std::array{-1.0f, 0.25f}, block.data());
  decode_block8(DataType::block8_unsigned, block.data(), back);
  EXPECT_EQ(back[0], 0);
}

TEST(Block8, HasABlocksSizeAndNoElements) {
  EXPECT_EQ(bytes_of(DataType::block8, 256), 260);
  EXPECT_EQ(bytes_of(DataType::block8, 257), 520);
  EXPECT_EQ(bytes_of(DataType::block8_unsigned, 0), 0);
  EXPECT_EQ(bytes_of(DataType::bfloat16, 5), 10);
  EXPECT_EQ(message_of<LogicError>([] { (void)size_of(DataType::block8_unsigned); }),
            "an element of block8_unsigned has no size of its own");
  std::byte memory[1040];
  const TensorView view{memory, DataType::block8, Shape{1000}};
  EXPECT_EQ(view.bytes(), 1040);
  EXPECT_EQ(view.slice(512, 100).data, memory + 520);
  EXPECT_EQ(message_of<InvalidArgument>([&] { (void)view.slice(100, 1); }),
            "element 100 of block8 does not begin a block of 256");
  EXPECT_EQ(name_of(DataType::block8), "block8");
  EXPECT_THROW((void)parse_data_type("block8"), ConfigurationError);  // it is not a dtype of weights or
                                                                      // gradients
}

}  // namespace
}  // namespace tranche::test
