#include "tranche/kernels/rope.h"

#include <gmock/gmock.h>

#include <cmath>

#include "kernels/cpu/instruction_sets.h"
#include "kernels/reference/rope.h"
#include "tests/kernels/kernel_testing.h"

namespace tranche::kernels {
namespace {

using namespace testing;

constexpr auto fp32 = DataType::float32;

RopeScaling llama3_scaling() {
  return {.kind = RopeScaling::Kind::llama3, .factor = 8, .original_positions = 8192};
}

void expect_frequencies(const std::vector<float>& got, const std::vector<float>& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    // PyTorch's power differs from ours by at most one unit in the last place, which the reciprocal may
    // double.
    EXPECT_NEAR(got[i], wanted[i], std::ldexp(std::abs(wanted[i]), -22)) << i;
  }
}

// inv_freq of transformers 5.23's LlamaRotaryEmbedding with PyTorch 2.15.
TEST(Rope, FrequenciesAreThoseOfTransformers) {
  expect_frequencies(rope_frequencies(16, 10000, {}),
                     {0x1p+0f, 0x1.43d136p-2f, 0x1.99999ap-4f, 0x1.030dc6p-5f, 0x1.47ae14p-7f, 0x1.9e7c70p-9f,
                      0x1.0624dep-10f, 0x1.4b96c0p-12f});
  expect_frequencies(rope_frequencies(16, 10000, {.kind = RopeScaling::Kind::linear, .factor = 3}),
                     {0x1.555556p-2f, 0x1.afc19ep-4f, 0x1.111112p-5f, 0x1.5967b2p-7f, 0x1.b4e81ap-9f,
                      0x1.1452f6p-10f, 0x1.5d867ep-12f, 0x1.ba1e56p-14f});
  // Llama 3.1 8B: high frequencies do not change, from the 30th on they are interpolated, from the 36th on
  // they are an eighth.
  const std::vector<float> stretched = rope_frequencies(128, 500000, llama3_scaling());
  expect_frequencies(
      {stretched.begin() + 26, stretched.begin() + 38},
      {0x1.3d2804p-8f, 0x1.025c6ap-8f, 0x1.a4ee40p-9f, 0x1.1bfa0cp-9f, 0x1.67a23ap-10f, 0x1.c12f3cp-11f,
       0x1.132ba4p-11f, 0x1.47e210p-12f, 0x1.765ba4p-13f, 0x1.90d10cp-14f, 0x1.46831ap-14f, 0x1.09fb7ep-14f});
  const std::vector<float> plain = rope_frequencies(128, 500000, {});
  for (std::size_t i = 0; i < 28; ++i) EXPECT_EQ(stretched[i], plain[i]) << i;
  for (std::size_t i = 36; i < 64; ++i) EXPECT_EQ(stretched[i], plain[i] / 8) << i;
}

std::vector<double> widened(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

TEST(Rope, TableHasTheAnglesOfItsPositions) {
  const std::vector<float> frequencies = rope_frequencies(34, 10000, {});
  const std::vector<std::int64_t> given{0, 1, 2, 40, 0, 3, 131071, 5, 5, 7, 8};
  for (int threads : compared_threads()) {
    Machine machine(threads);
    for (const std::int64_t time : {0, 1, 4, 11, 100}) {  // 0: positions are given
      std::vector<std::int64_t> positions = given;
      if (time > 0) {
        for (std::size_t row = 0; row < positions.size(); ++row) {
          positions[row] = static_cast<std::int64_t>(row) % time;
        }
      }
      HostTensor ids(DataType::int32, {11}, std::vector<double>(given.begin(), given.end()));
      HostTensor table(fp32, {11, 34});
      rope_table(machine.stream(), frequencies, time > 0 ? ConstTensorView() : ids.view(), time,
                 table.view());
      std::vector<double> wanted(11 * 34);
      reference::rope_table(widened(frequencies), positions, wanted);
      // The angle is rounded to fp32 as transformers does, 131071 radians to 0.004.
      std::vector<double> bound(wanted.size());
      for (std::size_t i = 0; i < bound.size(); ++i) {
        bound[i] = 1e-7 + std::ldexp(static_cast<double>(positions[i / 34]), -24);
      }
      expect_within(table.values(), wanted, bound, "table");
      EXPECT_TRUE(table.guard_intact());
    }
  }
}

TEST(Rope, ATableFromAPositionOnIsThatPartOfTheWhole) {
  const std::vector<float> frequencies = rope_frequencies(6, 100, {});
  Machine machine(1);
  HostTensor whole(fp32, {20, 6}), part(fp32, {14, 6});
  rope_table(machine.stream(), frequencies, {}, 20, whole.view());
  rope_table(machine.stream(), frequencies, {}, 7, part.view(), 5);
  for (std::size_t i = 0; i < 14 * 6; ++i) {
    EXPECT_EQ(part.values()[i], whole.values()[5 * 6 + i % (7 * 6)]) << i;
  }
}

TEST(Rope, TableTakesMoreFrequenciesThanOneLaunch) {
  const std::vector<float> frequencies = rope_frequencies(1030, 10000, {});
  HostTensor table(fp32, {3, 1030});
  Machine machine;
  rope_table(machine.stream(), frequencies, {}, 3, table.view());
  std::vector<double> wanted(3 * 1030);
  reference::rope_table(widened(frequencies), std::vector<std::int64_t>{0, 1, 2}, wanted);
  expect_close(table.values(), wanted, 0, 3e-7, "table");
}

struct Sizes {
  std::int64_t rows, heads, head_dim, width;
};
// Widths near vectors, heads that are rotated in part, an odd number of heads, empty operands, and more than
// the loop's table.
constexpr Sizes odd_sizes[] = {{1, 1, 2, 2},     {3, 2, 16, 16}, {5, 3, 34, 34}, {2, 1, 64, 64},
                               {7, 5, 128, 128}, {4, 3, 80, 20}, {3, 2, 7, 6},   {2, 3, 24, 24},
                               {5, 2, 66, 62},   {0, 2, 8, 8},   {3, 0, 8, 8},   {31, 9, 32, 32},
                               {2, 3, 700, 694}};

HostTensor table_of(const Sizes& sizes, Stream& stream) {
  HostTensor table(fp32, {sizes.rows, sizes.width});
  rope_table(stream, rope_frequencies(sizes.width, 10000, {}), {}, 1000, table.view());
  return table;
}

TEST(Rope, AgreesWithTheReferenceInEveryDtypeAndRotatesBack) {
  Random random(81);
  Machine machine(2);
  for (DataType dtype : floating_dtypes) {
    for (const Sizes& sizes : odd_sizes) {
      const auto [rows, heads, head_dim, width] = sizes;
      SCOPED_TRACE(::testing::Message() << name_of(dtype) << " " << rows << " x " << heads << " x "
                                        << head_dim << ", of which " << width);
      HostTensor table = table_of(sizes, machine.stream());
      for (bool inverse : {false, true}) {
        HostTensor x = random.tensor(dtype, {rows, heads * head_dim});
        const auto given = x.values();
        std::vector<double> wanted = given;
        reference::rope(inverse, table.values(), width, heads, head_dim, wanted);
        rope(machine.stream(), inverse, table.view(), heads, head_dim, x.view());
        // Two rounded products below 1, their sum, and the result.
        expect_close(x.values(), wanted, rounding_of(dtype), 3e-7, "x");
        EXPECT_TRUE(x.guard_intact());
        rope(machine.stream(), !inverse, table.view(), heads, head_dim, x.view());
        expect_close(x.values(), given, 0, 4 * rounding_of(dtype) + 6e-7, "back");
      }
    }
  }
}

TEST(Rope, InverseIsTheBackward) {
  Random random(82);
  const Sizes sizes{3, 2, 10, 8};
  Machine machine;
  const auto table = table_of(sizes, machine.stream()).values();
  const auto x = random.values(60), d_out = random.values(60);
  const auto loss = [&](const std::vector<double>& at) {
    std::vector<double> out = at;
    reference::rope(false, table, sizes.width, sizes.heads, sizes.head_dim, out);
    return dot(out, d_out);
  };
  std::vector<double> d_x = d_out;
  reference::rope(true, table, sizes.width, sizes.heads, sizes.head_dim, d_x);
  expect_close(d_x, finite_differences(x, loss), 0, 1e-9, "d_x");  // the loss is linear
}

TEST(Rope, BitsDependOnNeitherThreadsNorInstructionSet) {
  const Sizes sizes{300, 5, 36, 34};
  Machine one, several(3);
  HostTensor table = table_of(sizes, one.stream());
  for (DataType dtype : floating_dtypes) {
    Random random(83);
    const HostTensor given = random.tensor(dtype, {sizes.rows, sizes.heads * sizes.head_dim});
    const auto run_on = [&](Machine& machine) {
      HostTensor x = given;
      rope(machine.stream(), false, table.view(), sizes.heads, sizes.head_dim, x.view());
      return x.bytes();
    };
    // The scalar definition: products rounded, then the sum, then the cast to the dtype.
    std::vector<double> wanted = given.values();
    const auto angles = table.values();
    for (std::size_t head = 0; head < 1500; ++head) {
      for (std::size_t i = 0; i < 17; ++i) {
        const auto cosine = static_cast<float>(angles[head / 5 * 34 + i]),
                   sine = static_cast<float>(angles[head / 5 * 34 + 17 + i]);
        const auto a = static_cast<float>(wanted[head * 36 + i]),
                   b = static_cast<float>(wanted[head * 36 + 17 + i]);
        const float first = a * cosine, second = b * sine, third = b * cosine, fourth = a * sine;
        wanted[head * 36 + i] = first - second;
        wanted[head * 36 + 17 + i] = third + fourth;
      }
    }
    const TestBytes scalar = HostTensor(dtype, {sizes.rows, sizes.heads * sizes.head_dim}, wanted).bytes();
    EXPECT_TRUE(run_on(one) == scalar && run_on(several) == scalar) << name_of(dtype) << repeat_line();
    if (on_gpu) continue;
    for (const auto& set : cpu::instruction_sets()) {
      const cpu::InstructionSetForTest use(set);
      EXPECT_TRUE(run_on(several) == scalar) << set << " " << name_of(dtype) << repeat_line();
    }
  }
}

TEST(Rope, ANaNOfTheTableOfAnyPatternStaysOne) {
  Machine machine;
  Random random(58);
  for (DataType dtype : floating_dtypes) {
    HostTensor x = random.tensor(dtype, {2, 3 * 128});
    HostTensor table(fp32, {2, 128});  // like memory that was never written: all bits are ones
    rope(machine.stream(), false, table.view(), 3, 128, x.view());
    for (const double value : x.values()) ASSERT_TRUE(std::isnan(value)) << name_of(dtype);
  }
}

TEST(Rope, MetaCountsLikeTheCpuAndTouchesNothing) {
  Random random(84);
  HostTensor x = random.tensor(DataType::bfloat16, {6, 3 * 10}), table(fp32, {6, 8});
  HostTensor ids(DataType::int32, {6}, std::vector<double>{0, 1, 2, 0, 1, 2});
  const std::vector<float> frequencies = rope_frequencies(8, 10000, {});
  Machine cpu, meta(1, 0, DeviceKind::meta);
  rope_table(cpu.stream(), frequencies, ids.view(), 0, table.view());
  rope(cpu.stream(), true, table.view(), 3, 10, x.view());
  const TensorView no_table{nullptr, fp32, {6, 8}};
  rope_table(meta.stream(), frequencies, TensorView{nullptr, DataType::int32, {6}}, 0, no_table);
  rope(meta.stream(), true, no_table, 3, 10, {nullptr, DataType::bfloat16, {6, 30}});
  const WorkCount& work = meta.stream().work();
  EXPECT_EQ(work.kernels, 2);
  EXPECT_EQ(work.floating_point_operations, 29.0 * 24 + 3.0 * 6 * 3 * 8);
  EXPECT_EQ(work.bytes_read, 4.0 * 6 + 2.0 * 6 * 3 * 8 + 4.0 * 48);
  EXPECT_EQ(work.bytes_written, 4.0 * 48 + 2.0 * 6 * 3 * 8);
  EXPECT_EQ(work.floating_point_operations, cpu.stream().work().floating_point_operations);
  EXPECT_EQ(work.bytes_read, cpu.stream().work().bytes_read);
  EXPECT_EQ(work.bytes_written, cpu.stream().work().bytes_written);
}

TEST(Rope, ErrorsSayWhatIsWrong) {
  EXPECT_EQ(refusal([] { rope_frequencies(7, 1e4, {}); }),
            "rope_frequencies: rotary_width is 7, wanted an even number from 2 on");
  EXPECT_EQ(refusal([] { rope_frequencies(8, 0, {}); }), "rope_frequencies: theta is 0, wanted above 0");
  EXPECT_EQ(refusal([] { rope_frequencies(8, 1e4, {.kind = RopeScaling::Kind::linear, .factor = -2}); }),
            "rope_frequencies: factor is -2, wanted above 0");
  RopeScaling scaling = llama3_scaling();
  scaling.low_frequency_factor = 4;
  EXPECT_EQ(refusal([&] { rope_frequencies(8, 1e4, scaling); }),
            "rope_frequencies: low_frequency_factor is 4 and high_frequency_factor 4, wanted 0 < low < high");
  scaling = llama3_scaling();
  scaling.original_positions = 0;
  EXPECT_EQ(refusal([&] { rope_frequencies(8, 1e4, scaling); }),
            "rope_frequencies: original_positions is 0, wanted at least 1");

  Machine machine(1, 0, DeviceKind::meta);
  const TensorView table{nullptr, fp32, {6, 8}}, half{nullptr, DataType::float16, {6, 8}},
      ids{nullptr, DataType::int32, {5}}, long_ids{nullptr, DataType::int64, {6}}, x{nullptr, fp32, {6, 30}};
  const std::vector<float> four(4), three(3);
  const auto made = [&](const std::vector<float>& frequencies, const ConstTensorView& positions,
                        std::int64_t time, const TensorView& to) {
    return refusal([&] { rope_table(machine.stream(), frequencies, positions, time, to); });
  };
  EXPECT_EQ(made(four, {}, 3, half), "rope_table: `table` has dtype fp16, wanted fp32");
  EXPECT_EQ(made(three, {}, 3, table), "rope_table: `table` has shape [6, 8], wanted [6, 6]");
  EXPECT_EQ(made(four, ids, 3, table), "rope_table: `positions` has 5 elements, wanted 6");
  EXPECT_EQ(made(four, long_ids, 3, table), "rope_table: `positions` has dtype int64, wanted int32");
  EXPECT_EQ(made(four, {}, 0, table),
            "rope_table: time is 0, wanted at least 1 where there are no positions");
  EXPECT_EQ(refusal([&] { rope_table(machine.stream(), four, {}, 3, table, -1); }),
            "rope_table: first_position is -1, wanted at least 0");
  const auto turned = [&](const TensorView& angles, std::int64_t head_dim, const TensorView& what) {
    return refusal([&] { rope(machine.stream(), false, angles, 3, head_dim, what); });
  };
  EXPECT_EQ(turned(half, 10, x), "rope: `table` has dtype fp16, wanted fp32");
  EXPECT_EQ(turned(table, 6, x),
            "rope: `table` has shape [6, 8], wanted an even number of columns up to head_dim, 6");
  EXPECT_EQ(turned(table, 10, table), "rope: `x` has 48 elements, wanted 180");
  EXPECT_EQ(turned(table, 10, {nullptr, DataType::int32, {6, 30}}),
            "rope: `x` has dtype int32, wanted fp32, bf16 or fp16");
}

}  // namespace
}  // namespace tranche::kernels
