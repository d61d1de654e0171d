#include "tranche/kernels/elementwise.h"

#include <gmock/gmock.h>

#include <cmath>

#include "vector_test_support.h"

namespace tranche::kernels::testing {
namespace {

void fill_bits(Guarded& out, const std::vector<std::uint32_t>& bits) {
  for (std::size_t i = 0; i < bits.size(); ++i) out.as<std::uint32_t>()[i] = bits[i];
}

TEST(InstructionSets, CoverTheBaselineAndCanBeChosen) {
  if (on_gpu) GTEST_SKIP() << "GPUs have none to choose";
  const auto sets = tested_instruction_sets();
  ASSERT_FALSE(sets.empty());
#if defined(__x86_64__)  // the baseline's name depends on Highway's version
  EXPECT_THAT(sets.back(), ::testing::AnyOf("SCALAR", "SSE2"));
#endif
  const std::string usual = cpu::instruction_set();
  EXPECT_EQ(usual, sets.front());
  for (const auto& set : sets) {
    const cpu::InstructionSetForTest use(set);
    EXPECT_EQ(cpu::instruction_set(), set);
  }
  EXPECT_EQ(cpu::instruction_set(), usual);
  EXPECT_THAT(refusal([] { cpu::InstructionSetForTest use("Z80"); }),
              ::testing::StartsWith("instruction set Z80 cannot run here; can: "));
}

TEST(Cast, WidensEverySixteenBitPatternAsCoreDoes) {
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const DataType type : {DataType::bfloat16, DataType::float16}) {
      Guarded from(type, 65536);
      Guarded to(DataType::float32, 65536);
      Guarded back(type, 65536);
      for (std::uint32_t i = 0; i < 65536; ++i) from.as<std::uint16_t>()[i] = static_cast<std::uint16_t>(i);
      TestStream stream;
      cast(stream, from.view(), to.view());
      cast(stream, to.view(), back.view());
      for (std::int64_t i = 0; i < 65536; ++i) {
        ASSERT_EQ(to.as<std::uint32_t>()[i], std::bit_cast<std::uint32_t>(from.get(i)))
            << set << ", " << name_of(type) << " pattern " << i;
        if (!std::isnan(from.get(i))) {
          ASSERT_EQ(back.as<std::uint16_t>()[i], i) << set << ' ' << name_of(type);
        }
      }
    }
  }
}

/// Every fp32 number next to a 16-bit value and next to the midpoint of two, with both signs, and NaNs with
/// every payload bit.
std::vector<std::uint32_t> boundary_bits(DataType type) {
  std::vector<std::uint32_t> all;
  for (std::uint32_t i = 0; i < 65536; i += test::sanitized ? 5 : 1) {  // a stride of 5 still includes every
                                                                        // exponent
    const auto pattern = static_cast<std::uint16_t>(i);
    const float value = type == DataType::bfloat16 ? to_float(bfloat16{pattern}) : to_float(float16{pattern});
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t half_unit = type == DataType::bfloat16 ? 0x8000u : 0x1000u;
    for (const std::uint32_t near : {bits, bits + half_unit}) {
      for (const std::uint32_t exact : {near - 1, near, near + 1}) all.push_back(exact);
    }
  }
  // fp16 subnormals: the midpoints of neighbours n * 2^-24 are (2n + 1) * 2^-25.
  for (std::uint32_t n = 0; n < 2100; ++n) {
    const auto bits = std::bit_cast<std::uint32_t>(std::ldexp(static_cast<float>(n), -25));
    for (const std::uint32_t exact : {bits == 0 ? 0 : bits - 1, bits, bits + 1}) {
      all.push_back(exact);
      all.push_back(exact | 0x80000000u);
    }
  }
  for (int bit = 0; bit < 23; ++bit) {
    all.push_back(0x7f800000u | (1u << bit));
    all.push_back(0xff800000u | (1u << bit));
  }
  std::mt19937 engine(1);
  for (int i = 0; i < test::fewer(100000); ++i) all.push_back(static_cast<std::uint32_t>(engine()));
  return all;
}

TEST(Cast, NarrowsAsCoreDoesAtEveryBoundary) {
  for (const DataType type : {DataType::bfloat16, DataType::float16}) {
    const auto bits = boundary_bits(type);
    Guarded from(DataType::float32, static_cast<std::int64_t>(bits.size()));
    fill_bits(from, bits);
    Guarded wanted(type, from.elements());
    for (std::int64_t i = 0; i < from.elements(); ++i) wanted.set(i, from.get(i));
    for (const auto& set : tested_instruction_sets()) {
      const cpu::InstructionSetForTest use(set);
      Guarded to(type, from.elements());
      TestStream stream;
      cast(stream, from.view(), to.view());
      for (std::int64_t i = 0; i < from.elements(); ++i) {
        ASSERT_EQ(to.as<std::uint16_t>()[i], wanted.as<std::uint16_t>()[i])
            << set << ", fp32 bits " << std::hex << bits[static_cast<std::size_t>(i)] << " to "
            << name_of(type);
      }
    }
  }
}

TEST(Cast, EveryPairSizeAndThreadCount) {
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const DataType from_type : floating_types()) {
      for (const DataType to_type : floating_types()) {
        for (const std::int64_t n : vector_sizes()) {
          Guarded from(from_type, n);
          fill_random(from, static_cast<unsigned>(n));
          Guarded wanted(to_type, n);
          for (std::int64_t i = 0; i < n; ++i) wanted.set(i, from.get(i));
          Guarded to(to_type, n);
          TestStream stream;
          cast(stream, from.view(), to.view());
          ASSERT_EQ(to.bits(), wanted.bits()) << described(set, n, 1);
        }
      }
    }
  }
  Guarded from(DataType::float32, large_size);
  fill_random(from, 1);
  Guarded wanted(DataType::float16, large_size);
  for (std::int64_t i = 0; i < large_size; ++i) wanted.set(i, from.get(i));
  for (const int threads : thread_counts()) {
    Guarded to(DataType::float16, large_size);
    TestStream stream(threads);
    cast(stream, from.view(), to.view());
    EXPECT_TRUE(to.bits() == wanted.bits()) << threads << " threads";
  }
}

TEST(Cast, ToTheSameTypeKeepsSignallingNans) {
  Guarded from(DataType::float16, 1);
  from.as<std::uint16_t>()[0] = 0x7c01;
  Guarded to(DataType::float16, 1);
  TestStream stream;
  cast(stream, from.view(), to.view());
  EXPECT_EQ(to.bits(), from.bits());
}

TEST(CopyAndFill, EverySizeTypeAndThreadCount) {
  for (const int threads : thread_counts()) {
    for (const std::int64_t n : {std::int64_t{0}, std::int64_t{1}, std::int64_t{67}, 3 * large_size}) {
      for (const DataType type : floating_types()) {
        TestStream stream(threads);
        Guarded from(type, n);
        fill_random(from, 3);
        Guarded to(type, n);
        copy(stream, from.view(), to.view());
        EXPECT_TRUE(to.bits() == from.bits());
        copy(stream, to.view(), to.view());
        EXPECT_TRUE(to.bits() == from.bits());
        fill_zero(stream, to.view());
        EXPECT_TRUE(to.bits() == std::string(to.bits().size(), '\0'));
        fill_constant(stream, to.view(), 1.0f / 3.0f);
        for (std::int64_t i = 0; i < n; ++i) from.set(i, 1.0f / 3.0f);
        EXPECT_TRUE(to.bits() == from.bits());
      }
    }
  }
  Guarded integers(DataType::int64, 5);
  Guarded others(DataType::int64, 5);
  TestStream stream;
  fill_zero(stream, integers.view());
  copy(stream, integers.view(), others.view());
  EXPECT_EQ(others.bits(), std::string(40, '\0'));
}

TEST(Fill, RandomElementsAreTheirKeysDraws) {
  constexpr std::int64_t n = 5003;
  const RandomKey key{42, RandomPurpose::initialization, 7};
  Guarded normal(DataType::float32, n);
  Guarded uniform(DataType::float32, n);
  for (std::int64_t i = 0; i < n; ++i) {
    const auto index = static_cast<std::uint64_t>(1001 + i);
    normal.set(i, 0.5f + 0.02f * random_normal(key, index));
    uniform.set(i, -1.0f + (3.0f - -1.0f) * random_uniform(key, index));
  }
  for (const int threads : thread_counts()) {
    TestStream stream(threads);
    Guarded got(DataType::float32, n);
    fill_normal(stream, got.view(), key, 1001, 0.5f, 0.02f);
    EXPECT_TRUE(got.bits() == normal.bits());
    fill_uniform(stream, got.view(), key, 1001, -1.0f, 3.0f);
    EXPECT_TRUE(got.bits() == uniform.bits());
    // Parts that are computed separately, as on ranks, have the same elements.
    fill_normal(stream, got.view().slice(0, 333), key, 1001, 0.5f, 0.02f);
    fill_normal(stream, got.view().slice(333, n - 333), key, 1334, 0.5f, 0.02f);
    EXPECT_TRUE(got.bits() == normal.bits());
  }
}

TEST(Add, EveryTypeSizeAndInPlace) {
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const DataType a_type : floating_types()) {
      for (const DataType b_type : floating_types()) {
        for (const DataType out_type : floating_types()) {
          for (const std::int64_t n : {0, 1, 3, 7, 16, 33, 64, 131}) {
            Guarded a(a_type, n);
            Guarded b(b_type, n);
            fill_random(a, 1);
            fill_random(b, 2);
            Guarded wanted(out_type, n);
            for (std::int64_t i = 0; i < n; ++i) wanted.set(i, a.get(i) + b.get(i));
            Guarded out(out_type, n);
            TestStream stream;
            add(stream, a.view(), b.view(), out.view());
            ASSERT_EQ(out.bits(), wanted.bits()) << described(set, n, 1);
            if (a_type == out_type) {
              add(stream, a.view(), b.view(), a.view());
              ASSERT_EQ(a.bits(), wanted.bits()) << described(set, n, 1) << " in place";
            }
          }
        }
      }
    }
  }
}

TEST(Accumulate, EveryTypeSizeAndThreadCount) {
  const auto expect = [](DataType x_type, DataType sum_type, std::int64_t n, int threads,
                         const std::string& set) {
    Guarded x(x_type, n);
    Guarded sum(sum_type, n);
    fill_random(x, 1);
    fill_random(sum, 2);
    Guarded wanted = sum;
    for (std::int64_t i = 0; i < n; ++i) wanted.set(i, wanted.get(i) + x.get(i));
    TestStream stream(threads);
    accumulate(stream, x.view(), sum.view());
    ASSERT_TRUE(sum.bits() == wanted.bits()) << described(set, n, threads);
  };
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const DataType x_type : floating_types()) {
      for (const DataType sum_type : floating_types()) {
        for (const std::int64_t n : vector_sizes()) expect(x_type, sum_type, n, 1, set);
      }
    }
  }
  for (const int threads : thread_counts()) {
    expect(DataType::bfloat16, DataType::float32, large_size, threads, "best");
  }
}

TEST(Scale, EveryTypeSizeAndThreadCount) {
  const auto expect = [](DataType type, std::int64_t n, int threads, const std::string& set) {
    Guarded x(type, n);
    fill_random(x, 1);
    Guarded wanted = x;
    for (std::int64_t i = 0; i < n; ++i) wanted.set(i, 0.3f * wanted.get(i));
    TestStream stream(threads);
    scale(stream, 0.3f, x.view());
    ASSERT_TRUE(x.bits() == wanted.bits()) << described(set, n, threads);
  };
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const DataType type : floating_types()) {
      for (const std::int64_t n : vector_sizes()) expect(type, n, 1, set);
    }
  }
  for (const int threads : thread_counts()) expect(DataType::bfloat16, large_size, threads, "best");
}

TEST(AddBias, EveryRowGetsIt) {
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const DataType x_type : floating_types()) {
      for (const DataType bias_type : floating_types()) {
        for (const auto& [rows, columns] : {std::pair{0, 5}, {3, 0}, {1, 1}, {7, 19}, {5, 64}, {700, 131}}) {
          Guarded x(x_type, rows * columns);
          Guarded bias(bias_type, columns);
          fill_random(x, 1);
          fill_random(bias, 2);
          Guarded wanted = x;
          for (std::int64_t i = 0; i < rows * columns; ++i) {
            wanted.set(i, wanted.get(i) + bias.get(i % columns));
          }
          TestStream stream(x_type == bias_type ? thread_counts().back() : 1);
          add_bias(stream, x.view(Shape{rows, columns}), bias.view());
          ASSERT_TRUE(x.bits() == wanted.bits()) << set << ' ' << rows << 'x' << columns;
        }
      }
    }
  }
}

TEST(BiasGradient, IsTheBlockedSumForAnyThreadCount) {
  const auto sets = tested_instruction_sets();
  for (const DataType type : floating_types()) {
    for (const auto& [rows, columns] : {std::pair{0, 5},
                                        {3, 0},
                                        {1, 1},
                                        {63, 7},
                                        {64, 31},
                                        {65, 33},
                                        {128, 64},
                                        {129, 257},
                                        {1030, 70},
                                        {200, 515},
                                        {70, 1030}}) {
      Guarded gradient(type, rows * columns);
      fill_random(gradient, 1);
      Guarded start(DataType::float32, columns);
      fill_random(start, 2);
      Guarded wanted = start;
      for (std::int64_t column = 0; column < columns; ++column) {
        float total = 0;
        for (std::int64_t block = 0; block < rows; block += 64) {
          float sum = gradient.get(block * columns + column);
          for (std::int64_t row = block + 1; row < std::min<std::int64_t>(block + 64, rows); ++row) {
            sum = sum + gradient.get(row * columns + column);
          }
          total = block == 0 ? sum : total + sum;
        }
        if (rows > 0) wanted.set(column, wanted.get(column) + total);
      }
      for (const auto& set : sets) {
        const cpu::InstructionSetForTest use(set);
        for (const int threads : thread_counts()) {
          // Threads start slowly on a busy machine. One instruction set is enough to show that their
          // number changes no bit.
          if (threads > 1 && (rows * columns < 64000 || set != sets.front())) continue;
          Guarded got = start;
          TestStream stream(threads);
          bias_gradient(stream, gradient.view(Shape{rows, columns}), got.view(), test_workspace());
          ASSERT_TRUE(got.bits() == wanted.bits())
              << set << ' ' << rows << 'x' << columns << ", " << threads << " threads";
        }
      }
    }
  }
}

TEST(Elementwise, CountsTheSameOnMetaAndTouchesNothing) {
  TestStream cpu;
  TestStream meta(1, DeviceKind::meta);
  Guarded a(DataType::bfloat16, 12);
  Guarded b(DataType::float32, 12);
  Guarded bias(DataType::float32, 4);
  fill_random(a, 1);
  fill_random(b, 2);
  fill_random(bias, 2);
  const std::string before = a.bits() + b.bits() + bias.bits();
  const std::int64_t sample[] = {3};
  const RandomKey key;
  const DropoutOptions options{0.5f, 1, 2, 3, sample};
  for (TestStream* stream : {&meta, &cpu}) {
    cast(*stream, b.view(), a.view());
    EXPECT_EQ(stream->work().bytes_read, 48);
    EXPECT_EQ(stream->work().bytes_written, 24);
    copy(*stream, a.view(), a.view());
    fill_zero(*stream, b.view());
    fill_constant(*stream, b.view(), 2);
    EXPECT_EQ(stream->work().bytes_read, 72);
    EXPECT_EQ(stream->work().bytes_written, 144);
    EXPECT_EQ(stream->work().floating_point_operations, 0);
    fill_normal(*stream, b.view(), key, 0, 0, 1);
    fill_uniform(*stream, b.view(), key, 0, 0, 1);
    EXPECT_EQ(stream->work().floating_point_operations, 48);
    add(*stream, a.view(), b.view(), b.view());
    accumulate(*stream, a.view(), b.view());
    EXPECT_EQ(stream->work().floating_point_operations, 72);
    add_bias(*stream, b.view(Shape{3, 4}), bias.view());
    bias_gradient(*stream, a.view(Shape{3, 4}), bias.view(), test_workspace());
    EXPECT_EQ(stream->work().floating_point_operations, 96);
    EXPECT_EQ(stream->work().bytes_read, 72 + (24 + 48) * 2 + (48 + 16) + (24 + 16));
    gelu_forward(*stream, a.view(), b.view());
    gelu_backward(*stream, a.view(), b.view(), b.view());
    const auto before_both = stream->work();
    gelu_forward_backward(*stream, a.view(), b.view(), a.view(), b.view());
    EXPECT_EQ(stream->work().bytes_read - before_both.bytes_read, 24 + 48);
    EXPECT_EQ(stream->work().bytes_written - before_both.bytes_written, 24 + 48);
    EXPECT_EQ(stream->work().floating_point_operations - before_both.floating_point_operations, 12 * 36);
    dropout(*stream, options, a.view(), b.view());
    EXPECT_EQ(stream->work().kernels, 14);
    if (stream == &meta) {
      EXPECT_EQ(a.bits() + b.bits() + bias.bits(), before);
    }
  }
  EXPECT_EQ(cpu.work().floating_point_operations, meta.work().floating_point_operations);
  EXPECT_EQ(cpu.work().bytes_read, meta.work().bytes_read);
  EXPECT_EQ(cpu.work().bytes_written, meta.work().bytes_written);
}

TEST(Elementwise, RefusesByName) {
  TestStream stream(1, DeviceKind::meta);
  Guarded f(DataType::float32, 12);
  Guarded h(DataType::float16, 12);
  Guarded seven(DataType::float32, 7);
  Guarded integers(DataType::int32, 12);
  const auto x = f.view(), y = h.view(), s = seven.view(), n = integers.view();
  const RandomKey key;
  EXPECT_EQ(refusal([&] { cast(stream, n, x); }), "cast: `from` has dtype int32, wanted fp32, bf16 or fp16");
  EXPECT_EQ(refusal([&] { cast(stream, x, n); }), "cast: `to` has dtype int32, wanted fp32, bf16 or fp16");
  EXPECT_EQ(refusal([&] { cast(stream, x, s); }), "cast: `to` has 7 elements, wanted 12");
  EXPECT_EQ(refusal([&] { copy(stream, x, y); }), "copy: `to` has dtype fp16, wanted fp32");
  EXPECT_EQ(refusal([&] { copy(stream, x, s); }), "copy: `to` has 7 elements, wanted 12");
  EXPECT_EQ(refusal([&] { fill_constant(stream, n, 1); }),
            "fill_constant: `out` has dtype int32, wanted fp32, bf16 or fp16");
  EXPECT_EQ(refusal([&] { fill_normal(stream, y, key, 0, 0, 1); }),
            "fill_normal: `out` has dtype fp16, wanted fp32");
  EXPECT_EQ(refusal([&] { fill_normal(stream, x, key, -1, 0, 1); }),
            "fill_normal: first_element is -1, wanted at least 0");
  EXPECT_EQ(refusal([&] { fill_uniform(stream, y, key, 0, 0, 1); }),
            "fill_uniform: `out` has dtype fp16, wanted fp32");
  EXPECT_EQ(refusal([&] { fill_uniform(stream, x, key, -4, 0, 1); }),
            "fill_uniform: first_element is -4, wanted at least 0");
  EXPECT_EQ(refusal([&] { add(stream, x, x, n); }), "add: `out` has dtype int32, wanted fp32, bf16 or fp16");
  EXPECT_EQ(refusal([&] { add(stream, s, x, x); }), "add: `a` has 7 elements, wanted 12");
  EXPECT_EQ(refusal([&] { add(stream, x, s, x); }), "add: `b` has 7 elements, wanted 12");
  EXPECT_EQ(refusal([&] { add(stream, x, n, x); }), "add: `b` has dtype int32, wanted fp32, bf16 or fp16");
  EXPECT_EQ(refusal([&] { accumulate(stream, s, x); }), "accumulate: `x` has 7 elements, wanted 12");
  EXPECT_EQ(refusal([&] { accumulate(stream, x, n); }),
            "accumulate: `accumulator` has dtype int32, wanted fp32, bf16 or fp16");
  EXPECT_EQ(refusal([&] { scale(stream, 2, n); }), "scale: `x` has dtype int32, wanted fp32, bf16 or fp16");
  EXPECT_EQ(refusal([&] { add_bias(stream, x, s); }), "add_bias: `x` has shape [12], wanted 2 dimensions");
  EXPECT_EQ(refusal([&] {
              add_bias(stream, f.view(Shape{3, 4}), s);
            }),
            "add_bias: `bias` has shape [7], wanted [4]");
  EXPECT_EQ(refusal([&] {
              bias_gradient(stream, f.view(Shape{3, 4}), s);
            }),
            "bias_gradient: `bias_gradient` has shape [7], wanted [4]");
  EXPECT_EQ(refusal([&] {
              bias_gradient(stream, f.view(Shape{1, 12}), y);
            }),
            "bias_gradient: `bias_gradient` has dtype fp16, wanted fp32");
  EXPECT_EQ(refusal([&] { gelu_forward_backward(stream, x, s, x, x); }),
            "gelu_forward_backward: `dy` has 7 elements, wanted 12");
  EXPECT_EQ(refusal([&] { gelu_forward_backward(stream, x, x, n, x); }),
            "gelu_forward_backward: `y` has dtype int32, wanted fp32, bf16 or fp16");
  EXPECT_EQ(refusal([&] { bias_gradient(stream, x, x); }),
            "bias_gradient: `gradient` has shape [12], wanted 2 dimensions");
  EXPECT_EQ(refusal([&] { gelu_forward(stream, x, s); }), "gelu_forward: `y` has 7 elements, wanted 12");
  EXPECT_EQ(refusal([&] { gelu_backward(stream, x, s, x); }),
            "gelu_backward: `dy` has 7 elements, wanted 12");
  EXPECT_EQ(refusal([&] { gelu_backward(stream, x, x, n); }),
            "gelu_backward: `dx` has dtype int32, wanted fp32, bf16 or fp16");
  const std::int64_t samples[] = {0, 1, 2, 3, 4};
  for (const float p : {1.0f, -0.5f, NAN}) {
    EXPECT_THAT(refusal([&] {
                  dropout(stream, {p, 0, 0, 0, samples}, x, x);
                }),
                ::testing::MatchesRegex("dropout: probability is (1|-0.5|nan), wanted a number in .0, 1."));
  }
  EXPECT_EQ(refusal([&] {
              dropout(stream, {0.5f, 0, 0, 0, samples}, x, x);
            }),
            "dropout: `x` has 12 elements, which 5 samples do not divide");
  EXPECT_EQ(refusal([&] {
              dropout(stream, {0.5f, 0, 0, 0, {}}, x, x);
            }),
            "dropout: `x` has 12 elements, which 0 samples do not divide");
  EXPECT_EQ(refusal([&] {
              dropout(stream, {0.5f, 0, 0, 0, samples}, x, s);
            }),
            "dropout: `y` has 7 elements, wanted 12");
  EXPECT_EQ(stream.work().kernels, 0);
}

}  // namespace
}  // namespace tranche::kernels::testing
