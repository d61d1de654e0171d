// Tests on CPUs; matmul_gpu_test.cpp has those on GPUs.
#include "tranche/kernels/matmul_rows.h"
#include "tests/core/rounds.h"

#include <gmock/gmock.h>

#include "kernels/cpu/instruction_sets.h"
#include "tests/kernels/kernel_testing.h"

namespace tranche::kernels {
namespace {

using namespace testing;

struct Sizes {
  std::int64_t m, n, k;
};

struct Operands {
  Sizes sizes;
  bool transposed;
  HostTensor a, b, bias, c;
  Operands(DataType dtype, DataType c_dtype, const Sizes& s, bool transpose_b, Random& random)
      : sizes(s),
        transposed(transpose_b),
        a(random.tensor(dtype, {s.m, s.k})),
        b(random.tensor(dtype, transpose_b ? Shape{s.n, s.k} : Shape{s.k, s.n})),
        bias(random.tensor(dtype, {s.n})),
        c(c_dtype, {s.m, s.n}) {}
  void run(Machine& machine, bool with_bias) {
    matmul_rows(machine.stream(), transposed, a.view(), b.view(), with_bias ? bias.view() : ConstTensorView{},
                c.view(), machine.workspace());
  }
};

std::vector<Sizes> all_sizes() {
  return {{1, 1, 1},    {1, 130, 70}, {3, 5, 33}, {4, 64, 16}, {5, 67, 130},
          {9, 200, 24}, {1, 4500, 9}, {2, 3, 0},  {0, 4, 4}};
}

TEST(MatmulRows, AgreesWithTheReferenceInEveryDtype) {
  Machine machine(2);
  int point = 0;
  for (const DataType dtype : floating_dtypes) {
    for (const bool wide : {false, true}) {
      for (const bool transposed : {false, true}) {
        for (const Sizes& s : all_sizes()) {
          for (const bool with_bias : {false, true}) {
            const DataType c_dtype = wide ? DataType::float32 : dtype;
            if ((with_bias && c_dtype != dtype) || !test::swept(point++)) continue;
            Random random(static_cast<std::uint32_t>(111 + point));
            SCOPED_TRACE(::testing::Message()
                         << name_of(dtype) << " to " << name_of(c_dtype) << " " << s.m << " x " << s.n
                         << " x " << s.k << (transposed ? " t" : "") << (with_bias ? " bias" : ""));
            Operands run(dtype, c_dtype, s, transposed, random);
            run.run(machine, with_bias);
            std::vector<double> wanted(static_cast<std::size_t>(s.m * s.n));
            const auto a = run.a.values(), b = run.b.values(), bias = run.bias.values();
            for (std::int64_t i = 0; i < s.m; ++i) {
              for (std::int64_t j = 0; j < s.n; ++j) {
                double sum = with_bias ? bias[static_cast<std::size_t>(j)] : 0;
                for (std::int64_t l = 0; l < s.k; ++l) {
                  sum += a[static_cast<std::size_t>(i * s.k + l)] *
                         b[static_cast<std::size_t>(transposed ? j * s.k + l : l * s.n + j)];
                }
                wanted[static_cast<std::size_t>(i * s.n + j)] = sum;
              }
            }
            // Each product is below 1 with one fp32 rounding; a 16-bit c is rounded before and after the bias
            // is added.
            const double sums = static_cast<double>(s.k + 1) * 6e-8 * std::sqrt(static_cast<double>(s.k + 1));
            expect_close(
                run.c.values(), wanted, 2 * rounding_of(c_dtype),
                sums + (with_bias ? 4 * rounding_of(c_dtype) * std::sqrt(static_cast<double>(s.k + 1)) : 0) +
                    underflow_of(c_dtype),
                "c");
            EXPECT_TRUE(run.c.guard_intact());
          }
        }
      }
    }
  }
}

TEST(MatmulRows, ARowsBitsAreItsOwn) {
  int point = 0;
  for (const DataType dtype : floating_dtypes) {
    for (const bool transposed : {false, true}) {
      for (const auto& set : cpu::instruction_sets()) {
        const cpu::InstructionSetForTest use(set);
        Random random(112);
        Operands all(dtype, dtype, {11, 333, 150}, transposed, random);
        Machine one;
        all.run(one, true);
        const std::vector<double> a = all.a.values(), wanted = all.c.values();
        for (const int threads : compared_threads()) {
          Machine machine(threads);
          HostTensor c(dtype, {11, 333});
          matmul_rows(machine.stream(), transposed, all.a.view(), all.b.view(), all.bias.view(), c.view(),
                      machine.workspace());
          EXPECT_EQ(c.values(), wanted) << threads << " threads " << set;
        }
        for (std::int64_t first = 0; first < 11; ++first) {
          for (const std::int64_t rows : {1, 2, 3, 4, 6}) {
            if (first + rows > 11 || !test::swept(point++)) continue;
            HostTensor some(dtype, {rows, 150},
                            std::span(a).subspan(static_cast<std::size_t>(first * 150),
                                                 static_cast<std::size_t>(rows * 150))),
                c(dtype, {rows, 333});
            matmul_rows(one.stream(), transposed, some.view(), all.b.view(), all.bias.view(), c.view(),
                        one.workspace());
            const auto at = wanted.begin() + first * 333;
            EXPECT_EQ(c.values(), std::vector<double>(at, at + rows * 333))
                << first << " " << rows << " " << set;
          }
        }
      }
    }
  }
}

TEST(MatmulRows, MetaCountsLikeTheCpuAndTouchesNothing) {
  Random random(113);
  Operands run(DataType::bfloat16, DataType::bfloat16, {2, 6, 4}, true, random);
  Machine cpu, meta(1, minimum_workspace_bytes, DeviceKind::meta);
  run.run(cpu, true);
  const auto dtype = DataType::bfloat16;
  matmul_rows(meta.stream(), true, TensorView{nullptr, dtype, {2, 4}}, TensorView{nullptr, dtype, {6, 4}},
              TensorView{nullptr, dtype, {6}}, TensorView{nullptr, dtype, {2, 6}}, meta.workspace());
  const WorkCount& work = meta.stream().work();
  EXPECT_EQ(work.kernels, 1);
  EXPECT_EQ(work.floating_point_operations, 2.0 * 2 * 6 * 4 + 2 * 6);
  EXPECT_EQ(work.bytes_read, 2.0 * (8 + 24 + 6));
  EXPECT_EQ(work.bytes_written, 2.0 * 12);
  EXPECT_EQ(work.floating_point_operations, cpu.stream().work().floating_point_operations);
  EXPECT_EQ(work.bytes_read, cpu.stream().work().bytes_read);
}

TEST(MatmulRows, ErrorsNameTheOperand) {
  Machine machine(1, minimum_workspace_bytes, DeviceKind::meta);
  constexpr auto fp32 = DataType::float32, bf16 = DataType::bfloat16;
  const auto call = [&](const TensorView& a, const TensorView& b, const ConstTensorView& bias,
                        const TensorView& c, const Workspace& workspace) {
    return refusal([&] { matmul_rows(machine.stream(), true, a, b, bias, c, workspace); });
  };
  const TensorView a{nullptr, fp32, {2, 4}}, b{nullptr, fp32, {6, 4}}, bias{nullptr, fp32, {6}},
      c{nullptr, fp32, {2, 6}}, half_a{nullptr, bf16, {2, 4}}, half_b{nullptr, bf16, {6, 4}};
  EXPECT_EQ(call(a, b, bias, c, {}), "");
  EXPECT_EQ(call(a, half_b, bias, c, {}), "matmul_rows: `b` has dtype bf16, wanted fp32");
  EXPECT_EQ(call(a, c, bias, c, {}), "matmul_rows: `b (transposed)` has shape [2, 6], wanted [2, 4]");
  EXPECT_EQ(call(a, b, bias, b, {}), "matmul_rows: `c` has shape [6, 4], wanted [2, 6]");
  EXPECT_EQ(call(a, b, a, c, {}), "matmul_rows: `bias` has shape [2, 4], wanted [6]");
  EXPECT_EQ(call(half_a, half_b, TensorView{nullptr, bf16, {6}}, c, machine.workspace()),
            "matmul_rows: `c` has dtype fp32, wanted bf16");
  EXPECT_EQ(call(half_a, half_b, {}, c, {}), "matmul_rows: workspace has 0 bytes; bf16 GEMMs need at least " +
                                                 std::to_string(minimum_workspace_bytes) +
                                                 ": raise tranche.workspace");
}

}  // namespace
}  // namespace tranche::kernels
