#include "kernels/cpu/block8_codec.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "core/block8.h"
#include "vector_test_support.h"

namespace tranche::kernels::testing {
namespace {

constexpr DataType block_types[] = {DataType::block8, DataType::block8_unsigned};
constexpr std::size_t block = block8_elements;
constexpr std::uint32_t one = std::bit_cast<std::uint32_t>(1.0f);

std::size_t block_bytes(std::size_t elements) {
  return static_cast<std::size_t>(bytes_of(DataType::block8, static_cast<std::int64_t>(elements)));
}

/// Blocks encoded by core's arithmetic, one element at a time.
std::vector<std::byte> plain_blocks(DataType dtype, std::span<const float> values) {
  std::vector<std::byte> blocks(block_bytes(values.size()));
  detail::encode_blocks8(dtype, values, blocks.data());
  return blocks;
}
std::vector<std::byte> vector_blocks(DataType dtype, std::span<const float> values) {
  std::vector<std::byte> blocks(block_bytes(values.size()));
  cpu::encode_blocks8(dtype, values.data(), static_cast<std::int64_t>(values.size()), blocks.data());
  return blocks;
}

void expect_same_codes(DataType dtype, const std::vector<float>& values, const std::string& set) {
  const std::vector<std::byte> wanted = plain_blocks(dtype, values), got = vector_blocks(dtype, values);
  if (wanted == got) return;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::size_t at = i / block * block8_bytes + i % block;
    ASSERT_EQ(got[at], wanted[at]) << name_of(dtype) << ", " << set << ", element " << i << ": " << values[i];
  }
  FAIL() << name_of(dtype) << ", " << set << ": scales or codes beyond the end differ";
}

/// Numbers in [0, 1] in blocks whose greatest is 1, so that each number is its own fraction of the scale;
/// numbers at odd positions are negated.
class Shares {
 public:
  explicit Shares(bool negative) : negative_(negative) {}
  void add(std::uint32_t bits) {
    if (values_.size() % block == 0) values_.push_back(1);
    const float value = std::bit_cast<float>(bits);
    values_.push_back(negative_ ? -value : value);
  }
  const std::vector<float>& values() const { return values_; }

 private:
  bool negative_;
  std::vector<float> values_;
};

/// Compares the codes of numbers in [0, 1] whose bit patterns are `stride` apart, and of their negatives.
void sweep(std::uint32_t stride) {
  constexpr std::uint32_t at_once = 1u << 20;
  int point = 0;
  for (std::uint32_t first = 0; first <= one; first += std::min(one - first + 1, at_once * stride)) {
    for (const bool negative : {false, true}) {
      if (!test::swept(point++)) continue;
      Shares shares(negative);
      for (std::uint32_t k = 0; k < at_once && k * stride <= one - first; ++k) shares.add(first + k * stride);
      for (const DataType dtype : block_types) {
        for (const auto& set : tested_instruction_sets()) {
          const cpu::InstructionSetForTest use(set);
          expect_same_codes(dtype, shares.values(), set);
          if (::testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

TEST(Block8Codec, EncodesASweepOfNumbersAsCoreDoes) {
  sweep(test::sanitized ? 4001 : 63);  // tests more than 2^24 numbers
}

TEST(Block8CodecSlow, EncodesAllNumbersAsCoreDoes) {
  sweep(1);
}

// Borders are between two codes, and at the powers of two that divide the cases of the vectorized arithmetic.
TEST(Block8Codec, EncodesTheNeighboursOfEveryBorderAsCoreDoes) {
  for (const DataType dtype : block_types) {
    const bool with_sign = dtype == DataType::block8;
    for (const bool negative : {false, true}) {
      Shares shares(negative);
      const auto code = [&](std::uint32_t bits) {
        const float share = std::bit_cast<float>(bits);
        return with_sign ? detail::block8_code<true>(share) : detail::block8_code<false>(share);
      };
      const auto add_around = [&](std::uint32_t bits) {
        for (std::uint32_t at = bits < 40 ? 0 : bits - 40; at <= std::min(one, bits + 40); ++at) {
          shares.add(at);
        }
      };
      int borders = 0;
      for (std::uint32_t at = 0; code(at) != 255; ++borders) {
        std::uint32_t below = at, from = one;  // finds the smallest number with a larger code
        while (from - below > 1) {
          const std::uint32_t middle = below + (from - below) / 2;
          (code(middle) > code(at) ? from : below) = middle;
        }
        add_around(at = from);
      }
      EXPECT_EQ(borders, with_sign ? 128 : 255);
      for (std::uint32_t bits = 0; bits <= one; bits += 1u << 23) add_around(bits);
      for (const auto& set : tested_instruction_sets()) {
        const cpu::InstructionSetForTest use(set);
        expect_same_codes(dtype, shares.values(), set);
      }
    }
  }
}

// Scales over the whole range, with quotients that have to be rounded.
TEST(Block8Codec, EncodesBlocksOfEveryScaleAsCoreDoes) {
  std::mt19937 random(5);
  std::vector<float> values;
  for (int exponent = -149; exponent <= 127; ++exponent) {
    for (std::size_t i = 0; i < block; ++i) {
      const float fraction = 1.0f + static_cast<float>(random() % (1u << 23)) * 0x1p-23f;
      const float value = std::ldexp(fraction, exponent - static_cast<int>(random() % 26));
      values.push_back(random() % 2 == 0 ? value : -value);
    }
  }
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const DataType dtype : block_types) expect_same_codes(dtype, values, set);
  }
}

TEST(Block8Codec, EncodesZerosAndWhatIsNotFiniteAsCoreDoes) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  constexpr float largest = std::numeric_limits<float>::max(), least = 0x1p-149f;
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const DataType dtype : block_types) {
      for (const float greatest :
           {0.0f, -0.0f, infinity, -infinity, nan, -nan, largest, -largest, least, -1.0f}) {
        for (const float other : {0.0f, -0.0f, 1e-3f, -1e-3f, infinity, nan}) {
          for (const std::size_t at : {0u, 100u, 255u}) {
            std::vector<float> values(block, other);
            values[at] = greatest;
            expect_same_codes(dtype, values, set);
          }
        }
      }
    }
  }
}

TEST(Block8Codec, DecodesEveryCodeAsCoreDoes) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  std::vector<std::byte> blocks;
  for (const float scale : {1.0f, 0.0f, 0.37f, 3e38f, 1e-42f, -2.5f, infinity}) {
    const std::size_t begin = blocks.size();
    blocks.resize(begin + block8_bytes);
    for (std::size_t code = 0; code < block; ++code) {
      blocks[begin + (code * 37 + 11) % block] = static_cast<std::byte>(code);
    }
    std::memcpy(blocks.data() + begin + block, &scale, sizeof(scale));
  }
  const std::size_t elements = blocks.size() / block8_bytes * block;
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const DataType dtype : block_types) {
      for (const std::size_t count : {elements, elements - 1, elements - 255, elements - 256, block + 7}) {
        std::vector<float> wanted(count), got(count + 1, 7.0f);
        detail::decode_blocks8(dtype, blocks.data(), wanted);
        cpu::decode_blocks8(dtype, blocks.data(), static_cast<std::int64_t>(count), 384, got.data());
        EXPECT_EQ(std::memcmp(wanted.data(), got.data(), count * sizeof(float)), 0)
            << name_of(dtype) << ", " << set << ", " << count;
        EXPECT_EQ(got[count], 7.0f) << "an element beyond the end is written";
      }
    }
  }
}

TEST(Block8Codec, EncodesPartsOfBlocksAsCoreDoes) {
  std::mt19937 random(6);
  std::vector<float> values;
  for (std::size_t i = 0; i < 3 * block; ++i) values.push_back(static_cast<float>(random() % 4001) - 2000);
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const DataType dtype : block_types) {
      for (const std::size_t count : {0u, 1u, 15u, 64u, 255u, 256u, 257u, 700u, 768u}) {
        expect_same_codes(dtype, {values.begin(), values.begin() + static_cast<std::ptrdiff_t>(count)}, set);
      }
    }
  }
}

}  // namespace
}  // namespace tranche::kernels::testing
