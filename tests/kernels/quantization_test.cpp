#include "tranche/kernels/quantization.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/core/error_text.h"
#include "tranche/kernels/reduction.h"
#include "vector_test_support.h"

namespace tranche::kernels::testing {
namespace {

using ::testing::HasSubstr;

constexpr float infinity = std::numeric_limits<float>::infinity();

Guarded blocks_of(std::int64_t elements) {
  return {DataType::uint8, quantized_bytes(elements)};
}

float scale_of(Guarded& blocks, std::int64_t block) {
  float scale;
  std::memcpy(&scale, blocks.as<unsigned char>() + block * quantized_block_bytes + quantized_block,
              sizeof(scale));
  return scale;
}

std::int8_t code_of(Guarded& blocks, std::int64_t element) {
  return blocks
      .as<std::int8_t>()[element / quantized_block * quantized_block_bytes + element % quantized_block];
}

/// Checks the contract, in fp64 where fp32 could round twice.
void expect_contract(Guarded& values, Guarded& blocks, Guarded& read_back, const std::string& where) {
  for (std::int64_t b = 0; b < values.elements() / quantized_block; ++b) {
    float greatest = 0;
    for (std::int64_t i = b * quantized_block; i < (b + 1) * quantized_block; ++i) {
      greatest = std::max(greatest, std::abs(values.get(i)));
    }
    const float scale = greatest / 127.0f;
    ASSERT_EQ(scale_of(blocks, b), scale) << where;
    for (std::int64_t i = b * quantized_block; i < (b + 1) * quantized_block; ++i) {
      const float x = values.get(i);
      const float product = greatest == 0 ? 0 : x * (127.0f / greatest);
      ASSERT_EQ(code_of(blocks, i), static_cast<int>(std::nearbyint(product))) << where << " element " << i;
      const float back = static_cast<float>(code_of(blocks, i)) * scale;
      Guarded rounded(values.dtype(), 1);
      rounded.set(0, back);
      ASSERT_EQ(read_back.get(i), rounded.get(0)) << where << " element " << i;
      ASSERT_LE(std::abs(double{back} - double{x}), double{greatest} / 254 * (1 + 0x1p-15)) << where;
    }
  }
}

TEST(Quantization, BlocksHaveTheGreatestMagnitudeAndCodesToNearest) {
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const DataType dtype : floating_types()) {
      for (const std::int64_t blocks : {0, 1, 5}) {
        Guarded values(dtype, blocks * quantized_block);
        fill_random(values, static_cast<unsigned>(7 + blocks));
        Guarded packed = blocks_of(values.elements()), read_back(dtype, values.elements());
        TestStream stream;
        quantize(stream, values.view(), packed.view().data);
        dequantize(stream, packed.view().data, read_back.view());
        expect_contract(values, packed, read_back, described(set, values.elements(), 1));
      }
    }
  }
  for (const int threads : thread_counts()) {
    const std::int64_t elements = large_size / quantized_block * quantized_block;
    Guarded values(DataType::float32, elements), read_back(DataType::float32, elements);
    fill_random(values, 3);
    Guarded packed = blocks_of(elements);
    TestStream stream(threads);
    quantize(stream, values.view(), packed.view().data);
    dequantize(stream, packed.view().data, read_back.view());
    expect_contract(values, packed, read_back, described("best", elements, threads));
  }
}

/// Each tested number is in a block with small numbers, which it may change only through the scale.
TEST(Quantization, TiesExtremesAndZeros) {
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    const std::int64_t count = quantized_block;
    Guarded values(DataType::float32, count), packed = blocks_of(count), back(DataType::float32, count);
    TestStream stream;
    const auto run = [&] {
      quantize(stream, values.view(), packed.view().data);
      dequantize(stream, packed.view().data, back.view());
    };
    // Scale 1: 0.5, 1.5, 2.5 ... are ties, which go to the even neighbour.
    for (std::int64_t i = 0; i < count; ++i) values.set(i, static_cast<float>(i % 127) - 63.5f);
    values.set(200, 127.0f);
    run();
    EXPECT_EQ(scale_of(packed, 0), 1.0f);
    for (std::int64_t i = 0; i < count; ++i) {
      if (i == 200) continue;
      EXPECT_EQ(static_cast<int>(back.get(i)) % 2, 0) << i;
      EXPECT_EQ(std::abs(back.get(i) - values.get(i)), 0.5f) << i;
    }
    // The greatest finite number is read back as a finite one, and no neighbour becomes infinite.
    for (std::int64_t i = 0; i < count; ++i) values.set(i, i % 2 == 0 ? -0.0f : 1e30f);
    values.set(255, -std::numeric_limits<float>::max());
    run();
    EXPECT_TRUE(std::isfinite(back.get(255)));
    EXPECT_NEAR(back.get(255) / std::numeric_limits<float>::max(), -1.0f, 1e-6f);
    EXPECT_EQ(back.get(0), 0.0f);
    EXPECT_FALSE(std::signbit(back.get(0)));
    // Blocks of zeros, and of numbers whose scale would be subnormal.
    for (const float tiny : {0.0f, 0x1p-149f, 0x1.fffffep-120f}) {
      for (std::int64_t i = 0; i < count; ++i) values.set(i, i % 3 == 0 ? tiny : -tiny);
      run();
      EXPECT_EQ(scale_of(packed, 0), 0.0f) << tiny;
      for (std::int64_t i = 0; i < count; ++i) EXPECT_EQ(back.get(i), 0.0f) << tiny;
    }
    values.set(1, 0x1p-119f);
    run();
    EXPECT_NEAR(back.get(1) * 0x1p119f, 1.0f, 1e-6f);
  }
}

TEST(Quantization, InfinityAndNaNComeThroughAtTheirPlace) {
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const DataType dtype : floating_types()) {
      for (const float bad : {infinity, -infinity, std::nanf("")}) {
        for (const std::int64_t at : {0, 100, 255, 256, 511}) {
          Guarded values(dtype, 3 * quantized_block), back(dtype, values.elements());
          fill_random(values, 5);
          values.set(at, bad);
          Guarded packed = blocks_of(values.elements());
          TestStream stream;
          quantize(stream, values.view(), packed.view().data);
          dequantize(stream, packed.view().data, back.view());
          for (std::int64_t i = 0; i < values.elements(); ++i) {
            if (i == at) {
              EXPECT_TRUE(std::isnan(back.get(i))) << set << " " << at;
            } else if (i / quantized_block == at / quantized_block) {
              EXPECT_EQ(back.get(i), 0.0f);
            } else {
              EXPECT_TRUE(std::isfinite(back.get(i)));
            }
          }
          TestValue<GradientStatistics> statistics({});
          quantized_sum(stream, packed.view().data, 1, 1, false, back.view());
          gradient_statistics(stream, back.view(), statistics.data());
          EXPECT_EQ(statistics.get().first_non_finite, at);
        }
      }
    }
  }
}

TEST(Quantization, SumsAreThoseOfTheValuesReadBack) {
  const std::int64_t count = 3 * quantized_block;
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (int ranks = 1; ranks <= 9; ++ranks) {
      Guarded packed = blocks_of(ranks * count);
      std::vector<Guarded> pieces;
      std::vector<const void*> pointers;
      TestStream stream;
      for (int rank = 0; rank < ranks; ++rank) {
        Guarded values(DataType::float32, count);
        fill_random(values, static_cast<unsigned>(rank));
        auto* const place = packed.as<unsigned char>() + rank * quantized_bytes(count);
        quantize(stream, values.view(), place);
        pieces.emplace_back(DataType::float32, count);
        dequantize(stream, place, pieces.back().view());
      }
      for (auto& piece : pieces) pointers.push_back(piece.view().data);
      for (int group = -4; group <= 10; ++group) {
        for (const DataType out : floating_types()) {
          for (const bool accumulate : {false, true}) {
            Guarded got(out, count);
            fill_random(got, 99);
            Guarded wanted = got;
            const SumGroups groups(group, 1 + (ranks + group + 4) % 3);
            quantized_sum(stream, packed.view().data, ranks, groups, accumulate, got.view());
            ordered_sum(stream, pointers, DataType::float32, groups, accumulate, wanted.view());
            ASSERT_TRUE(got.bits() == wanted.bits())
                << set << " " << ranks << " ranks in groups of " << group << " and " << groups.outer
                << (accumulate ? " added" : "");
          }
        }
      }
    }
  }
}

TEST(Quantization, RefusesWhatIsNoBlock) {
  TestStream stream;
  Guarded values(DataType::float32, 300), whole(DataType::float32, 256), blocks = blocks_of(512);
  auto* const data = static_cast<unsigned char*>(blocks.view().data);
  EXPECT_THAT(test::message_of<InvalidArgument>([&] { quantize(stream, values.view(), data); }),
              HasSubstr("`values` has 300 elements, wanted whole blocks of 256"));
  EXPECT_THAT(test::message_of<InvalidArgument>([&] { dequantize(stream, data + 1, whole.view()); }),
              HasSubstr("`blocks` is not aligned to 4 bytes"));
  EXPECT_THAT(
      test::message_of<InvalidArgument>([&] { quantized_sum(stream, data, 0, 1, false, whole.view()); }),
      HasSubstr("ranks is 0, wanted at least 1"));
  EXPECT_THAT(test::message_of<InvalidArgument>([&] {
                quantized_sum(stream, data, 1, {1, 0}, false, whole.view());
              }),
              HasSubstr("0 groups in an outer group, wanted at least 1"));
}

TEST(Quantization, CountsItsWork) {
  TestStream stream(1, DeviceKind::meta);
  Guarded values(DataType::bfloat16, 512);
  quantize(stream, values.view(), nullptr);
  EXPECT_EQ(stream.work().bytes_read, 1024);
  EXPECT_EQ(stream.work().bytes_written, 520);
  quantized_sum(stream, nullptr, 3, 3, true, values.view());
  EXPECT_EQ(stream.work().bytes_read, 1024 + 3 * 520 + 1024);
  EXPECT_EQ(stream.work().bytes_written, 520 + 1024);
}

}  // namespace
}  // namespace tranche::kernels::testing
