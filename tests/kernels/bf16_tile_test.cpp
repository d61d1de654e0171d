#include "kernels/cpu/bf16_tile.h"

#include "kernels/cpu/attention.h"
#include "kernels/cpu/attention_bf16.h"
#include "kernels/reference/attention.h"
#include "tests/kernels/kernel_testing.h"
#include "tranche/kernels/attention.h"

// Without fast bf16 tiles nothing here can run, and the tests pass trivially.

namespace tranche::kernels {
namespace {

using namespace testing;
using namespace cpu;

constexpr auto bf16 = DataType::bfloat16, fp32 = DataType::float32;

std::vector<bfloat16> draw(Random& random, std::int64_t count) {
  std::vector<bfloat16> values(static_cast<std::size_t>(count));
  for (auto& value : values) value = to_bfloat16(static_cast<float>(random.integer(-64, 64)) / 64.0f);
  return values;
}

/// A packed right operand with surroundings that would change any result that uses them.
struct Packed {
  std::int64_t columns;
  std::vector<bfloat16> data;
  Packed(std::int64_t depth, std::int64_t wanted_columns)
      : columns((wanted_columns + 15) / 16 * 16),
        data(static_cast<std::size_t>((depth + 1) / 2 * 2 * columns), to_bfloat16(777.0f)) {}
  float at(std::int64_t k, std::int64_t column) const {
    return to_float(data[static_cast<std::size_t>((k / 2 * columns + column) * 2 + k % 2)]);
  }
};

TEST(Bf16Tile, PackingsHoldTheirElementsAndZerosBehind) {
  if (!bf16_tiles_are_fast()) return;
  Random random(81);
  for (const auto& shape : {std::pair{1, 1}, {2, 16}, {7, 33}, {64, 64}, {31, 90}}) {
    const std::int64_t rows = shape.first, columns = shape.second;
    const std::int64_t stride = columns + 5;
    const auto from = draw(random, rows * stride);
    std::vector<float> wide(from.size());
    for (std::size_t i = 0; i < wide.size(); ++i) wide[i] = to_float(from[i]);
    const auto value = [&](std::int64_t row, std::int64_t column) {
      return row < rows && column < columns ? wide[static_cast<std::size_t>(row * stride + column)] : 0.0f;
    };
    Packed rows_packed(rows, columns), rounded(rows, columns);
    pack_rows(from.data(), stride, rows, columns, rows_packed.data.data(), rows_packed.columns);
    cpu::pack_rows(wide.data(), stride, rows, columns, rounded.data.data(), rounded.columns);
    for (std::int64_t k = 0; k < rows + rows % 2; ++k) {
      for (std::int64_t column = 0; column < rows_packed.columns; ++column) {
        ASSERT_EQ(rows_packed.at(k, column), value(k, column)) << k << " " << column;
        ASSERT_EQ(rounded.at(k, column), value(k, column)) << k << " " << column;
      }
    }
    if (columns % 2 != 0) continue;
    Packed transposed(columns, rows);
    pack_transposed(from.data(), stride, rows, columns, transposed.data.data(), transposed.columns);
    const std::int64_t padded = (rows + 15) / 16 * 16;
    std::vector<bfloat16> turned(static_cast<std::size_t>(columns * padded), to_bfloat16(777.0f));
    transpose_rows(from.data(), stride, rows, columns, turned.data(), padded);
    for (std::int64_t k = 0; k < columns; ++k) {
      for (std::int64_t column = 0; column < padded; ++column) {
        ASSERT_EQ(transposed.at(k, column), value(column, k)) << k << " " << column;
        ASSERT_EQ(to_float(turned[static_cast<std::size_t>(k * padded + column)]), value(column, k));
      }
    }
  }
}

TEST(Bf16Tile, NarrowingRoundsAndTouchesNothingElse) {
  if (!bf16_tiles_are_fast()) return;
  Random random(82);
  for (const auto& [rows, columns] : {std::pair{1, 2}, {3, 17}, {16, 16}, {37, 50}}) {
    const std::int64_t stride = columns + 3;
    std::vector<float> from(static_cast<std::size_t>(rows * stride));
    for (auto& value : from) value = static_cast<float>(random.integer(-100000, 100000)) / 7.0f;
    const bfloat16 guard = to_bfloat16(777.0f);
    const std::int64_t row_stride = columns + 2, turned_stride = rows + 1;
    std::vector<bfloat16> narrowed(static_cast<std::size_t>(rows * row_stride), guard);
    std::vector<bfloat16> turned(static_cast<std::size_t>(columns * turned_stride), guard);
    narrow_rows(from.data(), stride, rows, columns, narrowed.data(), row_stride);
    narrow_transposed(from.data(), stride, rows, columns, turned.data(), turned_stride);
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t i = 0; i < row_stride; ++i) {
        const bfloat16 wanted = i < columns ? to_bfloat16(from[static_cast<std::size_t>(row * stride + i)])
                                : i < columns + columns % 2 ? bfloat16{}
                                                            : guard;
        ASSERT_EQ(narrowed[static_cast<std::size_t>(row * row_stride + i)].bits, wanted.bits)
            << row << " " << i;
      }
    }
    for (std::int64_t i = 0; i < columns; ++i) {
      for (std::int64_t row = 0; row < turned_stride; ++row) {
        const bfloat16 wanted =
            row < rows ? to_bfloat16(from[static_cast<std::size_t>(row * stride + i)]) : guard;
        ASSERT_EQ(turned[static_cast<std::size_t>(i * turned_stride + row)].bits, wanted.bits)
            << i << " " << row;
      }
    }
  }
}

TEST(Bf16Tile, ProductsAgreeWithFp64AndStayInTheirTile) {
  if (!bf16_tiles_are_fast()) return;
  Random random(83);
  struct Problem {
    std::int64_t rows, columns, depth;
  };
  for (const Problem& p : {Problem{1, 1, 2}, Problem{5, 15, 6}, Problem{6, 64, 64}, Problem{13, 65, 34},
                           Problem{64, 90, 2}, Problem{9, 48, 256}, Problem{64, 256, 64}}) {
    for (const bool accumulate : {false, true}) {
      SCOPED_TRACE(::testing::Message() << p.rows << " x " << p.columns << " x " << p.depth << accumulate);
      const auto a = draw(random, p.rows * (p.depth + 2)), b = draw(random, p.depth * p.columns);
      Packed packed(p.depth, p.columns);
      pack_rows(b.data(), p.columns, p.depth, p.columns, packed.data.data(), packed.columns);
      const std::int64_t stride = p.columns + 1;
      std::vector<float> c(static_cast<std::size_t>(p.rows * stride), 0.5f);
      const float alpha = accumulate ? 1.0f : 0.25f;
      multiply({p.rows, p.columns, p.depth, a.data(), p.depth + 2, packed.data.data(), packed.columns,
                c.data(), stride, alpha, accumulate});
      for (std::int64_t row = 0; row < p.rows; ++row) {
        for (std::int64_t column = 0; column < p.columns; ++column) {
          double wanted = 0;
          for (std::int64_t k = 0; k < p.depth; ++k) {
            wanted += static_cast<double>(to_float(a[static_cast<std::size_t>(row * (p.depth + 2) + k)])) *
                      static_cast<double>(to_float(b[static_cast<std::size_t>(k * p.columns + column)]));
          }
          wanted = accumulate ? 0.5 + wanted : 0.25 * wanted;
          // Multiples of 2^-12 below 2^8: every sum is exact in fp32, in any order.
          ASSERT_EQ(static_cast<double>(c[static_cast<std::size_t>(row * stride + column)]), wanted)
              << row << " " << column;
        }
        ASSERT_EQ(c[static_cast<std::size_t>(row * stride + p.columns)], 0.5f) << "beyond row " << row;
      }
    }
  }
}

struct Outcome {
  HostTensor out, log_sum_exp, gradient;
};

struct Sizes {
  std::int64_t batch, time, width, heads;
};

/// Forward and backward of bf16 operands that depend only on the sizes.
Outcome attend(const Sizes& s, float dropout, int threads, std::int64_t workspace, const HostTensor& packed,
               const HostTensor& d_out) {
  Machine machine(threads, workspace);
  AttentionOptions options;
  std::vector<std::int64_t> samples(static_cast<std::size_t>(s.batch), 1000);
  options.heads = s.heads;
  options.dropout = {.probability = dropout, .seed = 5, .step = 7, .site = 3, .samples = samples};
  Outcome made{HostTensor(bf16, {s.batch, s.time, s.width}), HostTensor(fp32, {s.batch, s.heads, s.time}),
               HostTensor(bf16, {s.batch, s.time, 3 * s.width})};
  HostTensor in = packed, gradient_in = d_out;
  const TensorView rows = in.view(), gradient = made.gradient.view();
  attention_forward(machine.stream(), options, {rows}, {rows, s.width}, {rows, 2 * s.width}, made.out.view(),
                    made.log_sum_exp.view(), machine.workspace());
  attention_backward(machine.stream(), options, gradient_in.view(), {rows}, {rows, s.width},
                     {rows, 2 * s.width}, made.out.view(), made.log_sum_exp.view(), {gradient},
                     {gradient, s.width}, {gradient, 2 * s.width}, machine.workspace());
  EXPECT_TRUE(made.out.guard_intact() && made.log_sum_exp.guard_intact() && made.gradient.guard_intact());
  return made;
}

const Sizes heads_of_32[] = {
    {1, 1, 32, 1}, {2, 17, 64, 2}, {1, 65, 128, 2}, {1, 257, 64, 1}, {1, 330, 192, 3}};

TEST(AttentionBf16, AgreesWithTheReference) {
  for (const Sizes& s : heads_of_32) {
    SCOPED_TRACE(::testing::Message() << s.batch << " x " << s.time << " x " << s.width << ", " << s.heads);
    Random random(84);
    const HostTensor packed = random.tensor(bf16, {s.batch, s.time, 3 * s.width}, -2, 2);
    const HostTensor d_out = random.tensor(bf16, {s.batch, s.time, s.width});
    const Outcome made = attend(s, 0.0f, 2, minimum_workspace_bytes, packed, d_out);
    std::vector<double> out(made.out.values().size()), sums(made.log_sum_exp.values().size());
    std::vector<double> gradient(made.gradient.values().size());
    const reference::AttentionShape shape{.batch = s.batch,
                                          .time = s.time,
                                          .heads = s.heads,
                                          .key_value_heads = s.heads,
                                          .head_width = s.width / s.heads,
                                          .document_begin = {}};
    const auto values = packed.values();
    const auto parts = reference::packed<const double>(values, s.width);
    reference::attention_forward(shape, parts, {}, out, sums);
    reference::attention_backward(shape, d_out.values(), parts, {},
                                  reference::packed<double>(gradient, s.width));
    // Probabilities, and results below 2 in magnitude, are rounded by 2^-9; the gradient of a score also has
    // the roundings of `out`, in a sum over the head.
    expect_close(made.out.values(), out, 0.004, 0.006, "out");
    expect_close(made.log_sum_exp.values(), sums, 2e-6, 2e-5, "log_sum_exp");
    expect_close(made.gradient.values(), gradient, 0.01, 0.015, "gradient");
  }
}

TEST(AttentionBf16, BitsDependNeitherOnThreadsNorOnWorkspace) {
  for (const Sizes& s : heads_of_32) {
    Random random(85);
    const HostTensor packed = random.tensor(bf16, {s.batch, s.time, 3 * s.width}, -2, 2);
    const HostTensor d_out = random.tensor(bf16, {s.batch, s.time, s.width});
    const auto bytes = [&](int threads, std::int64_t workspace) {
      const Outcome made = attend(s, 0.2f, threads, workspace, packed, d_out);
      return std::vector{made.out.bytes(), made.log_sum_exp.bytes(), made.gradient.bytes()};
    };
    const auto first = bytes(1, minimum_workspace_bytes);
    EXPECT_EQ(first, bytes(3, minimum_workspace_bytes));
    // With the smallest workspace keys are packed tile by tile, and the gradient of the queries takes a
    // separate pass.
    EXPECT_EQ(first, bytes(2, cpu::attention_workspace_bytes(s.width / s.heads)));
  }
}

TEST(AttentionBf16, DropsOutWhatTheMaskSays) {
  // fp32 attention draws the same mask; a wrong factor would cause an error as large as its probability.
  const Sizes s{1, 130, 64, 2};
  Random random(86);
  HostTensor packed = random.tensor(bf16, {s.batch, s.time, 3 * s.width}, -2, 2);
  HostTensor d_out = random.tensor(bf16, {s.batch, s.time, s.width});
  const Outcome made = attend(s, 0.4f, 2, minimum_workspace_bytes, packed, d_out);
  Machine machine(2);
  HostTensor wide(fp32, {s.batch, s.time, 3 * s.width}, packed.values());
  HostTensor wide_d_out(fp32, {s.batch, s.time, s.width}, d_out.values());
  HostTensor out(fp32, {s.batch, s.time, s.width}), sums(fp32, {s.batch, s.heads, s.time});
  HostTensor gradient(fp32, {s.batch, s.time, 3 * s.width});
  const std::vector<std::int64_t> samples{1000};
  AttentionOptions options;
  options.heads = s.heads;
  options.dropout = {.probability = 0.4f, .seed = 5, .step = 7, .site = 3, .samples = samples};
  const TensorView rows = wide.view(), d_rows = gradient.view();
  attention_forward(machine.stream(), options, {rows}, {rows, s.width}, {rows, 2 * s.width}, out.view(),
                    sums.view(), machine.workspace());
  attention_backward(machine.stream(), options, wide_d_out.view(), {rows}, {rows, s.width},
                     {rows, 2 * s.width}, out.view(), sums.view(), {d_rows}, {d_rows, s.width},
                     {d_rows, 2 * s.width}, machine.workspace());
  expect_close(made.out.values(), out.values(), 0.004, 0.01, "out");
  expect_close(made.gradient.values(), gradient.values(), 0.01, 0.02, "gradient");
}

TEST(AttentionBf16, IsTakenForWholeMultiplesOf32Alone) {
  EXPECT_FALSE(cpu::attention_runs_in_bf16(fp32, 64));
  EXPECT_FALSE(cpu::attention_runs_in_bf16(DataType::float16, 64));
  EXPECT_FALSE(cpu::attention_runs_in_bf16(bf16, 48));
  EXPECT_EQ(cpu::attention_runs_in_bf16(bf16, 64), bf16_tiles_are_fast());
}

}  // namespace
}  // namespace tranche::kernels
