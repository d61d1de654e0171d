#include "tranche/kernels/rms_norm.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>

#include "kernels/reference/elementwise.h"
#include "kernels/reference/rms_norm.h"
#include "tests/kernels/kernel_testing.h"

namespace tranche::kernels {
namespace {

using namespace testing;

constexpr auto fp32 = DataType::float32;
constexpr float epsilon = 1e-5f;

struct Sizes {
  std::int64_t rows, columns;
};
// Sizes near vector widths, the 64-row blocks and the 64-column chunks of the sums; rows of 64 are those of
// heads.
constexpr Sizes odd_sizes[] = {{1, 1},   {1, 7},    {3, 16},   {5, 17},    {2, 31},   {63, 33}, {64, 8},
                               {65, 64}, {300, 64}, {129, 65}, {130, 127}, {7, 1031}, {0, 5}};

/// All inputs and outputs of one forward and backward.
struct Operands {
  HostTensor x, weight, d_out, out, rstd, d_x, weight_gradient;

  Operands(DataType dtype, Sizes sizes, Random& random)
      : x(random.tensor(dtype, {sizes.rows, sizes.columns}, -2, 3)),
        weight(random.tensor(dtype, {sizes.columns})),
        d_out(random.tensor(dtype, {sizes.rows, sizes.columns})),
        out(dtype, {sizes.rows, sizes.columns}),
        rstd(fp32, {sizes.rows}),
        d_x(random.tensor(dtype, {sizes.rows, sizes.columns})),
        weight_gradient(random.tensor(fp32, {sizes.columns})) {}

  void forward(Stream& stream) {
    rms_norm_forward(stream, x.view(), weight.view(), epsilon, out.view(), rstd.view());
  }
  void backward(Stream& stream, bool accumulate, const Workspace& workspace = test_workspace()) {
    rms_norm_backward(stream, d_out.view(), x.view(), weight.view(), rstd.view(), accumulate, d_x.view(),
                      weight_gradient.view(), workspace);
  }
};

TEST(RmsNorm, AgreesWithTheReferenceInEveryDtypeAndOddSizes) {
  Random random(61);
  Machine machine(2);
  for (DataType dtype : floating_dtypes) {
    for (const Sizes& sizes : odd_sizes) {
      for (bool accumulate : {false, true}) {
        SCOPED_TRACE(::testing::Message() << name_of(dtype) << " " << sizes.rows << " x " << sizes.columns
                                          << " accumulate " << accumulate);
        const auto [rows, columns] = sizes;
        Operands run(dtype, sizes, random);
        if (!accumulate) run.d_x = HostTensor(dtype, {rows, columns});
        std::vector<double> out(run.out.values().size()), rstd(run.rstd.values().size());
        reference::rms_norm_forward(rows, columns, run.x.values(), run.weight.values(), epsilon, out, rstd);
        run.forward(machine.stream());
        // fp32 sums of squares, all positive, then one rounding to the dtype.
        expect_close(run.out.values(), out, rounding_of(dtype) + 4e-6, underflow_of(dtype), "out");
        expect_close(run.rstd.values(), rstd, 2e-6, 0, "rstd");

        std::vector<double> d_x = run.d_x.values(), weight_gradient = run.weight_gradient.values();
        reference::rms_norm_backward(rows, columns, run.d_out.values(), run.x.values(), run.weight.values(),
                                     run.rstd.values(), accumulate, d_x, weight_gradient);
        run.backward(machine.stream(), accumulate);
        // d_x is rstd times a difference of terms of size 1, which may cancel.
        double largest_rstd = 1;
        for (double value : rstd) largest_rstd = std::max(largest_rstd, value);
        expect_close(run.d_x.values(), d_x, rounding_of(dtype) + 1e-6,
                     4e-6 * largest_rstd + underflow_of(dtype), "d_x");
        // At most 300 terms of size 3.
        expect_close(run.weight_gradient.values(), weight_gradient, 1e-5, 6e-5, "weight_gradient");
        for (const HostTensor* tensor : {&run.out, &run.rstd, &run.d_x, &run.weight_gradient}) {
          EXPECT_TRUE(tensor->guard_intact());
        }
      }
    }
  }
}

/// Compares with LlamaRMSNorm of transformers 5.23 (epsilon 1e-6) on bf16, computed by hand: the sum of
/// squares is 30, their mean 7.5, and rstd 0.365148. It rounds x rstd before it multiplies by the weight, so
/// our single rounding may differ from it by two.
TEST(RmsNorm, IsWithinTwoRoundingsOfTheOneThatRoundsInBetween) {
  HostTensor x(DataType::bfloat16, {1, 4}, std::vector<double>{1, 2, 3, 4});
  HostTensor weight(DataType::bfloat16, {4}, std::vector<double>{1, 0.5, -3, 1.0078125});
  HostTensor out(DataType::bfloat16, {1, 4}), rstd(fp32, {1});
  Machine machine;
  rms_norm_forward(machine.stream(), x.view(), weight.view(), 1e-6f, out.view(), rstd.view());
  expect_close(rstd.values(), std::vector<double>{0.3651483}, 1e-6, 0, "rstd");
  const auto got = out.values(), weights = weight.values(), values = x.values();
  for (std::size_t i = 0; i < 4; ++i) {
    const double normal = to_float(to_bfloat16(static_cast<float>(values[i] * 0.3651483)));
    EXPECT_NEAR(got[i], normal * weights[i], 2 * std::ldexp(std::abs(got[i]), -8)) << i;
  }
}

TEST(RmsNorm, BackwardAgreesWithFiniteDifferencesOfTheReference) {
  Random random(62);
  Machine machine;
  const Sizes sizes{3, 19};
  Operands run(fp32, sizes, random);
  const auto x = run.x.values(), weight = run.weight.values(), d_out = run.d_out.values();
  const auto loss = [&](const std::vector<double>& at, const std::vector<double>& scale) {
    std::vector<double> out(at.size()), rstd(3);
    reference::rms_norm_forward(sizes.rows, sizes.columns, at, scale, epsilon, out, rstd);
    return dot(out, d_out);
  };
  const auto x_slopes = finite_differences(x, [&](const auto& v) { return loss(v, weight); });
  const auto weight_slopes = finite_differences(weight, [&](const auto& v) { return loss(x, v); });

  // Finite differences with h = 1e-5 have errors of about 1e-9.
  std::vector<double> out(x.size()), rstd(3), d_x(x.size()), weight_gradient(weight.size(), 0.0);
  reference::rms_norm_forward(sizes.rows, sizes.columns, x, weight, epsilon, out, rstd);
  reference::rms_norm_backward(sizes.rows, sizes.columns, d_out, x, weight, rstd, false, d_x,
                               weight_gradient);
  expect_close(d_x, x_slopes, 1e-7, 1e-8, "reference d_x");
  expect_close(weight_gradient, weight_slopes, 1e-7, 1e-8, "reference weight_gradient");

  // fp32 arithmetic has errors of less than 1e-5.
  run.weight_gradient = HostTensor(fp32, {sizes.columns}, std::vector<double>(19, 0.0));
  run.forward(machine.stream());
  run.backward(machine.stream(), false);
  expect_close(run.d_x.values(), x_slopes, 1e-5, 1e-5, "d_x");
  expect_close(run.weight_gradient.values(), weight_slopes, 1e-5, 1e-5, "weight_gradient");
}

/// The sum is an output as well. Its gradient is that of the norm plus the gradient that arrives for the
/// output, and is the gradient of both addends.
TEST(RmsNorm, OfAResidualSumHasTheGradientOfFiniteDifferences) {
  Random random(67);
  Machine machine;
  const Sizes sizes{4, 13};
  Operands run(fp32, sizes, random);
  HostTensor other = random.tensor(fp32, {4, 13}), sum(fp32, {4, 13});
  const auto a = run.x.values(), b = other.values(), weight = run.weight.values(), d_out = run.d_out.values(),
             d_sum = run.d_x.values();
  const auto loss = [&](const std::vector<double>& x, const std::vector<double>& y,
                        const std::vector<double>& scale) {
    std::vector<double> added(x.size()), out(x.size()), rstd(4);
    reference::add(x, y, added);
    reference::rms_norm_forward(sizes.rows, sizes.columns, added, scale, epsilon, out, rstd);
    return dot(out, d_out) + dot(added, d_sum);
  };
  const auto a_slopes = finite_differences(a, [&](const auto& v) { return loss(v, b, weight); });
  const auto b_slopes = finite_differences(b, [&](const auto& v) { return loss(a, v, weight); });
  const auto weight_slopes = finite_differences(weight, [&](const auto& v) { return loss(a, b, v); });

  std::vector<double> added(a.size()), out(a.size()), rstd(4), d_x = d_sum, weight_gradient(13, 0.0);
  reference::add(a, b, added);
  reference::rms_norm_forward(sizes.rows, sizes.columns, added, weight, epsilon, out, rstd);
  reference::rms_norm_backward(sizes.rows, sizes.columns, d_out, added, weight, rstd, true, d_x,
                               weight_gradient);
  expect_close(d_x, a_slopes, 1e-7, 1e-8, "reference d_a");
  expect_close(d_x, b_slopes, 1e-7, 1e-8, "reference d_b");
  expect_close(weight_gradient, weight_slopes, 1e-7, 1e-8, "reference weight_gradient");

  run.weight_gradient = HostTensor(fp32, {13}, std::vector<double>(13, 0.0));
  residual_rms_norm_forward(machine.stream(), run.x.view(), other.view(), run.weight.view(), epsilon,
                            sum.view(), run.out.view(), run.rstd.view());
  machine.stream().synchronize();
  run.x = sum;
  run.backward(machine.stream(), true);
  expect_close(run.d_x.values(), a_slopes, 1e-5, 1e-5, "d_x");
  expect_close(run.weight_gradient.values(), weight_slopes, 1e-5, 1e-5, "weight_gradient");
}

TEST(RmsNorm, BitsDoNotDependOnThreads) {
  Machine alone;
  for (int threads : compared_threads()) {
    Machine several(threads);
    for (DataType dtype : floating_dtypes) {
      for (const Sizes& sizes : {Sizes{201, 131}, {1031, 64}}) {
        const auto run_on = [&](Machine& machine) {
          Random random(63);
          Operands run(dtype, sizes, random);
          run.forward(machine.stream());
          run.backward(machine.stream(), true);
          return std::vector{run.out.bytes(), run.rstd.bytes(), run.d_x.bytes(), run.weight_gradient.bytes()};
        };
        EXPECT_EQ(run_on(alone), run_on(several)) << name_of(dtype) << " " << threads;
      }
    }
  }
}

/// The workspace may hold the sums of a few blocks at a time or of all at once, or none with a second pass.
TEST(RmsNorm, BitsDoNotDependOnTheWorkspaceOfTheCpu) {
  if (on_gpu) GTEST_SKIP() << "a GPU's blocks follow from the shape and the workspace";
  Machine alone, several(3);
  for (DataType dtype : floating_dtypes) {
    const auto run_on = [&](Machine& machine, std::int64_t bytes) {
      Random random(65);
      Operands run(dtype, {1000, 67}, random);
      run.forward(machine.stream());
      run.backward(machine.stream(), false, {test_workspace().data, bytes});
      return std::vector{run.d_x.bytes(), run.weight_gradient.bytes()};
    };
    const auto wanted = run_on(alone, 0);
    for (const std::int64_t sums : {1, 2, 4, 5, 100}) {
      EXPECT_EQ(wanted, run_on(alone, sums * 4 * 80)) << name_of(dtype) << " " << sums;
      EXPECT_EQ(wanted, run_on(several, sums * 4 * 80)) << name_of(dtype) << " " << sums;
    }
  }
}

/// One pass has the bits of the two passes that it replaces, on either device, also in place on an addend.
TEST(RmsNorm, OfAResidualSumIsTheSumAndThenTheNorm) {
  Random random(66);
  for (DataType dtype : floating_dtypes) {
    for (const auto& [rows, columns] : {std::pair{1, 1}, {3, 17}, {5, 64}, {9, 768}, {2, 1030}, {2, 2048}}) {
      Operands run(dtype, {rows, columns}, random);
      HostTensor other = random.tensor(dtype, {rows, columns}), sum(dtype, {rows, columns});
      HostTensor out(dtype, {rows, columns}), rstd(fp32, {rows});
      Machine machine;
      residual_rms_norm_forward(machine.stream(), run.x.view(), other.view(), run.weight.view(), epsilon,
                                sum.view(), out.view(), rstd.view());
      HostTensor in_place = run.x;
      residual_rms_norm_forward(machine.stream(), in_place.view(), other.view(), run.weight.view(), epsilon,
                                in_place.view(), run.out.view(), run.rstd.view());
      EXPECT_EQ(in_place.values(), sum.values());
      EXPECT_EQ(run.out.values(), out.values());
      std::vector<double> added = run.x.values();
      const std::vector<double> addend = other.values();
      for (std::size_t i = 0; i < added.size(); ++i) added[i] += addend[i];
      EXPECT_EQ(sum.values(), HostTensor(dtype, {rows, columns}, added).values()) << repeat_line();
      run.x = sum;
      run.forward(machine.stream());
      EXPECT_EQ(run.out.values(), out.values()) << name_of(dtype) << ' ' << rows << " x " << columns;
      EXPECT_EQ(run.rstd.values(), rstd.values());
    }
  }
}

TEST(RmsNorm, WeightGradientSumsBlocksOf64RowsInOrder) {
  if (on_gpu) GTEST_SKIP() << "a GPU's blocks follow from the shape and the workspace";
  constexpr std::int64_t rows = 70;
  const double large = std::ldexp(1.0, 24);  // absorbs a 1 that is added to it, not a 2
  const auto gradient_of = [&](const std::vector<double>& d_out) {
    const std::vector<double> ones(rows, 1.0);
    HostTensor gradient(fp32, {rows, 1}, d_out), x(fp32, {rows, 1}, ones),
        weight(fp32, {1}, std::vector<double>{1.0}), rstd(fp32, {rows}, ones), d_x(fp32, {rows, 1}),
        weight_gradient(fp32, {1}, std::vector<double>{0.0});
    Machine machine;
    rms_norm_backward(machine.stream(), gradient.view(), x.view(), weight.view(), rstd.view(), false,
                      d_x.view(), weight_gradient.view(), test_workspace());
    return weight_gradient.values()[0];
  };
  std::vector<double> last_of_block(rows, 0.0), before_last(rows, 0.0);
  last_of_block[63] = large;  // the following ones belong to the next block, whose sum is 2
  last_of_block[64] = last_of_block[65] = 1.0;
  EXPECT_EQ(gradient_of(last_of_block), large + 2.0);
  before_last[62] = large;  // one of the ones is in its block, the other in the next one, so both are
                            // absorbed
  before_last[63] = before_last[64] = 1.0;
  EXPECT_EQ(gradient_of(before_last), large);
}

TEST(RmsNorm, ANaNOfAnyPatternStaysOne) {
  Machine machine;
  for (DataType dtype : floating_dtypes) {
    Random random(67);
    Operands run(dtype, {3, 65}, random);  // `rstd` is like memory that was never written: all bits are ones
    run.backward(machine.stream(), false);
    for (const double value : run.d_x.values()) ASSERT_TRUE(std::isnan(value)) << name_of(dtype);
    run.x = HostTensor(dtype, {3, 65});  // likewise for 16-bit operands
    run.forward(machine.stream());
    for (const double value : run.out.values()) ASSERT_TRUE(std::isnan(value)) << name_of(dtype);
  }
}

TEST(RmsNorm, MetaCountsLikeTheCpuAndTouchesNothing) {
  Random random(64);
  Operands run(DataType::bfloat16, {6, 10}, random);
  Machine cpu, meta(1, 0, DeviceKind::meta);
  residual_rms_norm_forward(cpu.stream(), run.x.view(), run.x.view(), run.weight.view(), epsilon,
                            run.d_x.view(), run.out.view(), run.rstd.view());
  run.forward(cpu.stream());
  run.backward(cpu.stream(), true);
  const TensorView x{nullptr, DataType::bfloat16, {6, 10}}, row{nullptr, DataType::bfloat16, {10}};
  const TensorView statistic{nullptr, fp32, {6}}, gradient{nullptr, fp32, {10}};
  residual_rms_norm_forward(meta.stream(), x, x, row, epsilon, x, x, statistic);
  rms_norm_forward(meta.stream(), x, row, epsilon, x, statistic);
  rms_norm_backward(meta.stream(), x, x, row, statistic, true, x, gradient, {});
  const WorkCount& work = meta.stream().work();
  EXPECT_EQ(work.kernels, 3);
  EXPECT_EQ(work.floating_point_operations, (5.0 + 4.0 + 9.0) * 60);
  EXPECT_EQ(work.bytes_read, 2.0 * (120 + 10) + 2.0 * (60 + 10) + 2.0 * (180 + 10) + 4.0 * (6 + 10));
  EXPECT_EQ(work.bytes_written, 2.0 * (120 + 60 + 60) + 4.0 * (6 + 6 + 10));
  EXPECT_EQ(work.floating_point_operations, cpu.stream().work().floating_point_operations);
  EXPECT_EQ(work.bytes_read, cpu.stream().work().bytes_read);
  EXPECT_EQ(work.bytes_written, cpu.stream().work().bytes_written);
}

TEST(RmsNorm, ErrorsNameTheOperand) {
  Machine machine(1, 0, DeviceKind::meta);
  const TensorView x{nullptr, fp32, {6, 10}}, row{nullptr, fp32, {10}}, statistic{nullptr, fp32, {6}};
  const TensorView half{nullptr, DataType::float16, {6, 10}}, half_row{nullptr, DataType::float16, {10}};
  const TensorView short_row{nullptr, fp32, {9}}, empty{nullptr, fp32, {6, 0}}, scalar{nullptr, fp32, {}};
  const auto forward = [&](const TensorView& input, const TensorView& weight, const TensorView& out,
                           const TensorView& rstd) {
    return refusal([&] { rms_norm_forward(machine.stream(), input, weight, epsilon, out, rstd); });
  };
  EXPECT_EQ(forward(x, half_row, x, statistic), "rms_norm_forward: `weight` has dtype fp16, wanted fp32");
  EXPECT_EQ(forward(x, short_row, x, statistic), "rms_norm_forward: `weight` has 9 elements, wanted 10");
  EXPECT_EQ(forward(x, row, half, statistic), "rms_norm_forward: `out` has dtype fp16, wanted fp32");
  EXPECT_EQ(forward(x, row, x, row), "rms_norm_forward: `rstd` has 10 elements, wanted 6");
  EXPECT_EQ(forward(empty, row, x, statistic),
            "rms_norm_forward: `x` has shape [6, 0], wanted a last dimension above 0");
  EXPECT_EQ(forward(scalar, row, x, statistic),
            "rms_norm_forward: `x` is a scalar, wanted at least 1 dimension");
  EXPECT_EQ(
      refusal([&] { residual_rms_norm_forward(machine.stream(), half, x, row, epsilon, x, x, statistic); }),
      "residual_rms_norm_forward: `a` has dtype fp16, wanted fp32");
  EXPECT_EQ(
      refusal([&] { residual_rms_norm_forward(machine.stream(), x, row, row, epsilon, x, x, statistic); }),
      "residual_rms_norm_forward: `b` has 10 elements, wanted 60");
  const auto backward = [&](const TensorView& d_out, const TensorView& gradient) {
    return refusal(
        [&] { rms_norm_backward(machine.stream(), d_out, x, row, statistic, false, x, gradient, {}); });
  };
  EXPECT_EQ(backward(half, row), "rms_norm_backward: `d_out` has dtype fp16, wanted fp32");
  EXPECT_EQ(backward(x, half_row), "rms_norm_backward: `weight_gradient` has dtype fp16, wanted fp32");
  if (on_gpu) {
    Machine gpu;
    EXPECT_EQ(refusal([&] { rms_norm_backward(gpu.stream(), x, x, row, statistic, false, x, row, {}); }),
              "rms_norm_backward: the workspace has 0 bytes, wanted at least 40 on a GPU");
  }
}

}  // namespace
}  // namespace tranche::kernels
