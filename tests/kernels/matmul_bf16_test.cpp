#include "kernels/cpu/matmul_bf16.h"

#include "kernels/cpu/bf16_tile.h"
#include "tests/core/rounds.h"
#include "tests/kernels/kernel_testing.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/matmul.h"

// Without fast bf16 tiles nothing here can run, and the tests pass trivially. tests/kernels/matmul_test.cpp
// compares all GEMMs with fp64 in small sizes.

namespace tranche::kernels {
namespace {

using namespace testing;

constexpr auto bf16 = DataType::bfloat16, fp32 = DataType::float32;

struct Problem {
  std::int64_t m, n, k;
};

Shape stored(bool transposed, std::int64_t rows, std::int64_t columns) {
  return transposed ? Shape{columns, rows} : Shape{rows, columns};
}

/// Operands that are multiples of 1/4 below 2, so that every sum of up to 65536 products is exact in fp32.
HostTensor quarters(Random& random, const Shape& shape) {
  std::vector<double> values(static_cast<std::size_t>(shape.elements()));
  for (double& value : values) value = static_cast<double>(random.integer(-7, 7)) / 4.0;
  return {bf16, shape, values};
}

auto multiply(const Problem& p, const MatmulOptions& options, DataType c_dtype, HostTensor& a, HostTensor& b,
              HostTensor c, int threads, std::int64_t workspace) {
  Machine machine(threads, workspace);
  cpu::bf16_matmul({options.transpose_a, options.transpose_b, options.accumulate, p.m, p.n, p.k, bf16,
                    c_dtype, a.view().data, b.view().data, c.view().data, machine.workspace(), threads});
  EXPECT_TRUE(c.guard_intact());
  return c.bytes();
}

// Several panels and groups of panels, blocks of the depth, blocks of transposed rows, and chunks for a
// workspace that cannot hold a whole operand: the numbers and bits are the same for any division.
TEST(MatmulBf16, LongSumsAreExactInEveryCut) {
  if (!cpu::bf16_tiles_are_fast()) return;
  int point = 0;
  for (const Problem& p : {Problem{13, 70, 4102}, Problem{200, 330, 2050}, Problem{200, 130, 2050},
                           Problem{390, 130, 514}, Problem{131, 390, 1025}}) {
    for (int kind = 0; kind < 8; ++kind) {
      const MatmulOptions options{(kind & 1) != 0, (kind & 2) != 0, (kind & 4) != 0};
      if (options.transpose_b && p.k % 2 != 0) continue;
      if (!test::swept(point++, 7)) continue;
      Random random(static_cast<std::uint32_t>(91 + point));
      SCOPED_TRACE(::testing::Message() << p.m << " x " << p.n << " x " << p.k << " kind " << kind);
      HostTensor a = quarters(random, stored(options.transpose_a, p.m, p.k));
      HostTensor b = quarters(random, stored(options.transpose_b, p.k, p.n));
      const HostTensor before = quarters(random, {p.m, p.n});
      const HostTensor wide(fp32, {p.m, p.n}, before.values());
      const auto bytes = multiply(p, options, fp32, a, b, wide, 1, minimum_workspace_bytes);
      const std::vector<double> left = a.values(), right = b.values(), begin = wide.values();
      for (int draw = 0; draw < test::fewer(40); ++draw) {
        const std::int64_t row = random.integer(0, p.m - 1), column = random.integer(0, p.n - 1);
        double sum = options.accumulate ? begin[static_cast<std::size_t>(row * p.n + column)] : 0.0;
        for (std::int64_t k = 0; k < p.k; ++k) {
          sum += left[static_cast<std::size_t>(options.transpose_a ? k * p.m + row : row * p.k + k)] *
                 right[static_cast<std::size_t>(options.transpose_b ? column * p.k + k : k * p.n + column)];
        }
        float made = 0;
        std::memcpy(&made, bytes.data() + (row * p.n + column) * 4, sizeof(made));
        ASSERT_EQ(static_cast<double>(made), sum) << row << " " << column;
      }
      const auto narrow = multiply(p, options, bf16, a, b, before, 2, minimum_workspace_bytes);
      for (const auto& [threads, workspace] : {std::pair{2, minimum_workspace_bytes},
                                               {7, minimum_workspace_bytes / 4},
                                               {3, minimum_workspace_bytes / 8}}) {
        EXPECT_EQ(bytes, multiply(p, options, fp32, a, b, wide, threads, workspace)) << threads;
        EXPECT_EQ(narrow, multiply(p, options, bf16, a, b, before, threads, workspace)) << threads;
      }
    }
  }
}

// The part of a GEMM on a rank or in a micro-batch equals that part of the whole.
TEST(MatmulBf16, RowsAndColumnsAreTheSameAloneAndAmongOthers) {
  if (!cpu::bf16_tiles_are_fast()) return;
  Random random(92);
  const Problem whole{219, 150, 334};
  for (const bool turned : {false, true}) {
    const HostTensor left = random.tensor(bf16, {whole.m, whole.k}),
                     right = random.tensor(bf16, {whole.k, whole.n});
    const auto part = [&](std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns) {
      const auto x = left.values(), y = right.values();
      std::vector<double> a(static_cast<std::size_t>(rows * whole.k)),
          b(static_cast<std::size_t>(whole.k * columns));
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t k = 0; k < whole.k; ++k) {
          a[static_cast<std::size_t>(turned ? k * rows + i : i * whole.k + k)] =
              x[static_cast<std::size_t>((row + i) * whole.k + k)];
        }
      }
      for (std::int64_t k = 0; k < whole.k; ++k) {
        for (std::int64_t i = 0; i < columns; ++i) {
          b[static_cast<std::size_t>(turned ? i * whole.k + k : k * columns + i)] =
              y[static_cast<std::size_t>(k * whole.n + column + i)];
        }
      }
      HostTensor a_part(bf16, stored(turned, rows, whole.k), a),
          b_part(bf16, stored(turned, whole.k, columns), b);
      HostTensor c(fp32, {rows, columns});
      Machine machine(2);
      matmul(machine.stream(), {turned, turned, false}, a_part.view(), b_part.view(), c.view(),
             machine.workspace());
      return c.values();
    };
    const auto all = part(0, whole.m, 0, whole.n);
    for (const auto& [row, rows, column, columns] :
         {std::tuple{0, 1, 0, 150}, {7, 11, 0, 150}, {100, 119, 3, 1}, {0, 219, 65, 85}, {218, 1, 149, 1}}) {
      const auto some = part(row, rows, column, columns);
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t j = 0; j < columns; ++j) {
          ASSERT_EQ(some[static_cast<std::size_t>(i * columns + j)],
                    all[static_cast<std::size_t>((row + i) * whole.n + column + j)])
              << row + i << " " << column + j << " turned " << turned;
        }
      }
    }
  }
}

TEST(MatmulBf16, BiasIsAddedToTheRoundedSum) {
  Random random(93);
  Machine machine(2);
  for (const Problem& p : {Problem{5, 3, 7}, Problem{33, 100, 64}, Problem{70, 65, 2050}}) {
    HostTensor a = random.tensor(bf16, {p.m, p.k}), b = random.tensor(bf16, {p.k, p.n});
    HostTensor bias = random.tensor(bf16, {p.n}, -9, 9), fused(bf16, {p.m, p.n}), parts(bf16, {p.m, p.n});
    matmul_bias(machine.stream(), a.view(), b.view(), bias.view(), fused.view(), machine.workspace());
    matmul(machine.stream(), {}, a.view(), b.view(), parts.view(), machine.workspace());
    std::vector<double> spread;
    const auto values = bias.values();
    for (std::int64_t row = 0; row < p.m; ++row) spread.insert(spread.end(), values.begin(), values.end());
    HostTensor rows(bf16, {p.m, p.n}, spread);
    add(machine.stream(), parts.view(), rows.view(), parts.view());
    EXPECT_EQ(fused.bytes(), parts.bytes());
    EXPECT_TRUE(fused.guard_intact());
  }
}

// The element after a row of odd depth belongs to the next row, and an infinity there must not change this
// row.
TEST(MatmulBf16, OddDepthsReadNothingBehindTheirRows) {
  if (!cpu::bf16_tiles_are_fast()) return;
  const double infinity = std::numeric_limits<double>::infinity();
  const Problem p{3, 5, 3};
  HostTensor a(bf16, {p.m, p.k}, std::vector<double>{1, 2, 3, infinity, 1, 1, infinity, 1, 1});
  HostTensor b(bf16, {p.k, p.n}, std::vector<double>(15, 1));
  HostTensor c(fp32, {p.m, p.n});
  Machine machine(1);
  matmul(machine.stream(), {}, a.view(), b.view(), c.view(), machine.workspace());
  for (std::size_t i = 0; i < 5; ++i) EXPECT_EQ(c.values()[i], 6.0);
  for (std::size_t i = 5; i < 15; ++i) EXPECT_EQ(c.values()[i], infinity);
}

TEST(MatmulBf16, TakesWhatItSaysItTakes) {
  cpu::MatmulCall call;
  call.m = call.n = call.k = 1;
  call.dtype = bf16;
  const bool fast = cpu::bf16_tiles_are_fast();
  EXPECT_EQ(cpu::bf16_gemm_takes(call), fast);
  call.transpose_b = true;
  EXPECT_FALSE(cpu::bf16_gemm_takes(call));
  call.k = 65536;
  EXPECT_EQ(cpu::bf16_gemm_takes(call), fast);
  call.k = 65538;
  EXPECT_FALSE(cpu::bf16_gemm_takes(call));
  call.k = 2;
  call.dtype = DataType::float16;
  EXPECT_FALSE(cpu::bf16_gemm_takes(call));
  EXPECT_EQ(matmul_path(DeviceKind::cpu, bf16) == "own bf16 panels (avx512_bf16)", fast);
}

}  // namespace
}  // namespace tranche::kernels
