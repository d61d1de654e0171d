#include "tranche/kernels/layer_norm.h"

#include <gmock/gmock.h>

#include "kernels/reference/layer_norm.h"
#include "tests/kernels/kernel_testing.h"

namespace tranche::kernels {
namespace {

using namespace testing;

constexpr auto fp32 = DataType::float32;
constexpr float epsilon = 1e-5f;

struct Sizes {
  std::int64_t rows, columns;
};
// Sizes near vector widths, the 64-row blocks and the 64-column chunks of the sums.
constexpr Sizes odd_sizes[] = {{1, 1},  {1, 7},   {3, 16},   {5, 17},    {2, 31},   {63, 33},
                               {64, 8}, {65, 64}, {129, 65}, {130, 127}, {7, 1031}, {0, 5}};

/// All inputs and outputs of one forward and backward.
struct Operands {
  HostTensor x, weight, bias, dy, y, mean, rstd, dx, weight_gradient, bias_gradient;

  Operands(DataType dtype, Sizes sizes, Random& random)
      : x(random.tensor(dtype, {sizes.rows, sizes.columns}, -2, 3)),
        weight(random.tensor(dtype, {sizes.columns})),
        bias(random.tensor(dtype, {sizes.columns})),
        dy(random.tensor(dtype, {sizes.rows, sizes.columns})),
        y(dtype, {sizes.rows, sizes.columns}),
        mean(fp32, {sizes.rows}),
        rstd(fp32, {sizes.rows}),
        dx(random.tensor(dtype, {sizes.rows, sizes.columns})),
        weight_gradient(random.tensor(fp32, {sizes.columns})),
        bias_gradient(random.tensor(fp32, {sizes.columns})) {}

  void forward(Stream& stream) {
    layer_norm_forward(stream, x.view(), weight.view(), bias.view(), epsilon, y.view(), mean.view(),
                       rstd.view());
  }
  void backward(Stream& stream, bool accumulate_dx, const Workspace& workspace = test_workspace()) {
    layer_norm_backward(stream, dy.view(), x.view(), weight.view(), mean.view(), rstd.view(), accumulate_dx,
                        dx.view(), weight_gradient.view(), bias_gradient.view(), workspace);
  }
};

TEST(LayerNorm, AgreesWithTheReferenceInEveryDtypeAndOddSizes) {
  Random random(21);
  Machine machine(2);
  for (DataType dtype : floating_dtypes) {
    for (const Sizes& sizes : odd_sizes) {
      for (bool accumulate_dx : {false, true}) {
        SCOPED_TRACE(::testing::Message() << name_of(dtype) << " " << sizes.rows << " x " << sizes.columns
                                          << " accumulate_dx " << accumulate_dx);
        const auto [rows, columns] = sizes;
        Operands run(dtype, sizes, random);
        if (!accumulate_dx) run.dx = HostTensor(dtype, {rows, columns});
        std::vector<double> y(run.y.values().size()), mean(run.mean.values().size()), rstd(mean.size());
        reference::layer_norm_forward(rows, columns, run.x.values(), run.weight.values(), run.bias.values(),
                                      epsilon, y, mean, rstd);
        run.forward(machine.stream());
        // fp32 sums of `columns` terms of size 3, then one rounding to the dtype. A row of one column has
        // variance 0 and rstd 316, which amplifies the rounding of the mean.
        const double arithmetic = 1e-6 * (columns < 8 ? 100 : 4);
        expect_close(run.y.values(), y, rounding_of(dtype) + arithmetic, arithmetic, "y");
        expect_close(run.mean.values(), mean, 1e-6, 1e-6, "mean");
        expect_close(run.rstd.values(), rstd, 1e-5, 0, "rstd");

        std::vector<double> dx = run.dx.values(), weight_gradient = run.weight_gradient.values(),
                            bias_gradient = run.bias_gradient.values();
        reference::layer_norm_backward(rows, columns, run.dy.values(), run.x.values(), run.weight.values(),
                                       run.mean.values(), run.rstd.values(), accumulate_dx, dx,
                                       weight_gradient, bias_gradient);
        run.backward(machine.stream(), accumulate_dx);
        // dx is rstd times a difference of terms of size 1, which may cancel.
        double largest_rstd = 0;
        for (double value : rstd) largest_rstd = std::max(largest_rstd, value);
        expect_close(run.dx.values(), dx, rounding_of(dtype) + 1e-6,
                     4e-6 * largest_rstd + underflow_of(dtype), "dx");
        // At most 130 terms of size 3 (or of size |x - mean| rstd).
        expect_close(run.weight_gradient.values(), weight_gradient, 1e-5, 3e-5, "weight_gradient");
        expect_close(run.bias_gradient.values(), bias_gradient, 1e-5, 3e-5, "bias_gradient");
        for (const HostTensor* tensor : {&run.y, &run.mean, &run.rstd, &run.dx, &run.weight_gradient}) {
          EXPECT_TRUE(tensor->guard_intact());
        }
      }
    }
  }
}

TEST(LayerNorm, BackwardAgreesWithFiniteDifferencesOfTheReference) {
  Random random(22);
  Machine machine;
  const Sizes sizes{3, 19};
  Operands run(fp32, sizes, random);
  run.dx = HostTensor(fp32, {sizes.rows, sizes.columns});
  run.weight_gradient = HostTensor(fp32, {sizes.columns}, std::vector<double>(19, 0.0));
  run.bias_gradient = run.weight_gradient;
  run.forward(machine.stream());
  run.backward(machine.stream(), false);
  const auto dy = run.dy.values();
  const auto loss = [&](const std::vector<double>& x, const std::vector<double>& weight,
                        const std::vector<double>& bias) {
    std::vector<double> y(x.size()), mean(3), rstd(3);
    reference::layer_norm_forward(sizes.rows, sizes.columns, x, weight, bias, epsilon, y, mean, rstd);
    return dot(y, dy);
  };
  const auto x = run.x.values(), weight = run.weight.values(), bias = run.bias.values();
  // Finite differences with h = 1e-5 have errors of about 1e-9, fp32 arithmetic of less than 1e-5.
  expect_close(run.dx.values(), finite_differences(x, [&](const auto& v) { return loss(v, weight, bias); }),
               1e-5, 1e-5, "dx");
  expect_close(run.weight_gradient.values(),
               finite_differences(weight, [&](const auto& v) { return loss(x, v, bias); }), 1e-5, 1e-5,
               "weight");
  expect_close(run.bias_gradient.values(),
               finite_differences(bias, [&](const auto& v) { return loss(x, weight, v); }), 1e-5, 1e-5,
               "bias");
}

TEST(LayerNorm, BitsDoNotDependOnThreads) {
  for (DataType dtype : floating_dtypes) {
    const auto run_with = [&](int threads) {
      Random random(23);
      Machine machine(threads);
      Operands run(dtype, {201, 131}, random);
      run.forward(machine.stream());
      run.backward(machine.stream(), true);
      return std::vector{run.y.bytes(), run.dx.bytes(), run.weight_gradient.bytes(),
                         run.bias_gradient.bytes()};
    };
    const auto one = run_with(1);
    for (int threads : compared_threads())
      EXPECT_EQ(one, run_with(threads)) << name_of(dtype) << " " << threads;
  }
}

TEST(LayerNorm, BitsDoNotDependOnTheWorkspaceOfTheCpu) {
  if (on_gpu) GTEST_SKIP() << "a GPU's blocks follow from the shape and the workspace";
  Machine machine(3);
  for (DataType dtype : floating_dtypes) {
    const auto run_with = [&](std::int64_t bytes) {
      Random random(25);
      Operands run(dtype, {1000, 67}, random);
      run.forward(machine.stream());
      run.backward(machine.stream(), true, {test_workspace().data, bytes});
      return std::vector{run.dx.bytes(), run.weight_gradient.bytes(), run.bias_gradient.bytes()};
    };
    for (const std::int64_t sums : {4, 5, 100}) EXPECT_EQ(run_with(0), run_with(sums * 8 * 80)) << sums;
  }
}

/// One pass has the bits of the two passes that it replaces, on either device, also in place on an addend.
TEST(LayerNorm, OfAResidualSumIsTheSumAndThenTheNorm) {
  Random random(26);
  for (DataType dtype : floating_dtypes) {
    for (const auto& [rows, columns] : {std::pair{1, 1}, {3, 17}, {5, 64}, {9, 768}, {2, 1030}, {2, 2048}}) {
      Operands run(dtype, {rows, columns}, random);
      HostTensor other = random.tensor(dtype, {rows, columns}), residual(dtype, {rows, columns});
      HostTensor y(dtype, {rows, columns}), mean(fp32, {rows}), rstd(fp32, {rows});
      Machine machine;
      residual_layer_norm_forward(machine.stream(), run.x.view(), other.view(), run.weight.view(),
                                  run.bias.view(), epsilon, residual.view(), y.view(), mean.view(),
                                  rstd.view());
      HostTensor in_place = other;
      residual_layer_norm_forward(machine.stream(), run.x.view(), in_place.view(), run.weight.view(),
                                  run.bias.view(), epsilon, in_place.view(), run.y.view(), mean.view(),
                                  rstd.view());
      EXPECT_EQ(in_place.values(), residual.values());
      EXPECT_EQ(run.y.values(), y.values());
      std::vector<double> sum = run.x.values();
      const std::vector<double> addend = other.values();
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += addend[i];
      EXPECT_EQ(residual.values(), HostTensor(dtype, {rows, columns}, sum).values()) << repeat_line();
      run.x = residual;
      run.forward(machine.stream());
      EXPECT_EQ(run.y.values(), y.values()) << name_of(dtype) << ' ' << rows << " x " << columns;
      EXPECT_EQ(run.mean.values(), mean.values());
      EXPECT_EQ(run.rstd.values(), rstd.values());
    }
  }
  const TensorView x{nullptr, fp32, {4, 5}}, row{nullptr, fp32, {5}}, statistic{nullptr, fp32, {4}};
  const TensorView half{nullptr, DataType::float16, {4, 5}}, flat{nullptr, fp32, {}};
  Machine meta(1, 0, DeviceKind::meta);
  residual_layer_norm_forward(meta.stream(), x, x, row, row, epsilon, x, x, statistic, statistic);
  EXPECT_EQ(meta.stream().work().floating_point_operations, 9.0 * 20);
  EXPECT_EQ(meta.stream().work().bytes_read, 4.0 * (40 + 10));
  EXPECT_EQ(meta.stream().work().bytes_written, 4.0 * 40 + 8.0 * 4);
  const auto text = [&](const TensorView& a, const TensorView& residual) {
    return refusal([&] {
      residual_layer_norm_forward(meta.stream(), a, x, row, row, epsilon, residual, x, statistic, statistic);
    });
  };
  EXPECT_EQ(text(half, x), "residual_layer_norm_forward: `a` has dtype fp16, wanted fp32");
  EXPECT_EQ(text(row, x), "residual_layer_norm_forward: `a` has 5 elements, wanted 20");
  EXPECT_EQ(text(x, flat),
            "residual_layer_norm_forward: `residual` is a scalar, wanted at least 1 dimension");
}

TEST(LayerNorm, ParameterGradientsSumBlocksOf64RowsInOrder) {
  if (on_gpu) GTEST_SKIP() << "a GPU's blocks follow from the shape and the workspace";
  constexpr std::int64_t rows = 70;
  const double large = std::ldexp(1.0, 24);  // absorbs a 1 that is added to it, not a 2
  const auto bias_gradient_of = [&](const std::vector<double>& dy) {
    const std::vector<double> zeros(rows, 0.0), ones(rows, 1.0);
    HostTensor gradient(fp32, {rows, 1}, dy), x(fp32, {rows, 1}, zeros),
        weight(fp32, {1}, std::vector<double>{1.0}), mean(fp32, {rows}, zeros), rstd(fp32, {rows}, ones),
        dx(fp32, {rows, 1}), weight_gradient(fp32, {1}, std::vector<double>{0.0}),
        bias_gradient(fp32, {1}, std::vector<double>{0.0});
    Machine machine;
    layer_norm_backward(machine.stream(), gradient.view(), x.view(), weight.view(), mean.view(), rstd.view(),
                        false, dx.view(), weight_gradient.view(), bias_gradient.view(), test_workspace());
    return bias_gradient.values()[0];
  };
  std::vector<double> last_of_block(rows, 0.0), before_last(rows, 0.0);
  last_of_block[63] = large;  // the following ones belong to the next block, whose sum is 2
  last_of_block[64] = last_of_block[65] = 1.0;
  EXPECT_EQ(bias_gradient_of(last_of_block), large + 2.0);
  before_last[62] = large;  // one of the ones is in its block, the other in the next one, so both are
                            // absorbed
  before_last[63] = before_last[64] = 1.0;
  EXPECT_EQ(bias_gradient_of(before_last), large);
}

TEST(LayerNorm, MetaCountsLikeTheCpuAndTouchesNothing) {
  Random random(24);
  Operands run(DataType::bfloat16, {6, 10}, random);
  Machine cpu, meta(1, 0, DeviceKind::meta);
  run.forward(cpu.stream());
  run.backward(cpu.stream(), true);
  const TensorView x{nullptr, DataType::bfloat16, {6, 10}}, row{nullptr, DataType::bfloat16, {10}};
  const TensorView statistic{nullptr, fp32, {6}}, gradient{nullptr, fp32, {10}};
  layer_norm_forward(meta.stream(), x, row, row, epsilon, x, statistic, statistic);
  layer_norm_backward(meta.stream(), x, x, row, statistic, statistic, true, x, gradient, gradient);
  EXPECT_EQ(meta.stream().work().kernels, 2);
  EXPECT_EQ(meta.stream().work().floating_point_operations, (8.0 + 15.0) * 60);
  EXPECT_EQ(meta.stream().work().floating_point_operations, cpu.stream().work().floating_point_operations);
  EXPECT_EQ(meta.stream().work().bytes_read, cpu.stream().work().bytes_read);
  EXPECT_EQ(meta.stream().work().bytes_written, cpu.stream().work().bytes_written);
}

TEST(LayerNorm, ErrorsNameTheOperand) {
  Machine machine(1, 0, DeviceKind::meta);
  const TensorView x{nullptr, fp32, {6, 10}}, row{nullptr, fp32, {10}}, statistic{nullptr, fp32, {6}};
  const TensorView half_row{nullptr, DataType::float16, {10}}, short_row{nullptr, fp32, {9}};
  const TensorView empty{nullptr, fp32, {6, 0}}, scalar{nullptr, fp32, {}};
  const auto forward = [&](const TensorView& input, const TensorView& weight, const TensorView& mean) {
    return refusal(
        [&] { layer_norm_forward(machine.stream(), input, weight, row, epsilon, x, mean, statistic); });
  };
  EXPECT_EQ(forward(x, half_row, statistic), "layer_norm_forward: `weight` has dtype fp16, wanted fp32");
  EXPECT_EQ(forward(x, short_row, statistic), "layer_norm_forward: `weight` has 9 elements, wanted 10");
  EXPECT_EQ(forward(x, row, row), "layer_norm_forward: `mean` has 10 elements, wanted 6");
  EXPECT_EQ(forward(empty, row, statistic),
            "layer_norm_forward: `x` has shape [6, 0], wanted a last dimension above 0");
  EXPECT_EQ(forward(scalar, row, statistic),
            "layer_norm_forward: `x` is a scalar, wanted at least 1 dimension");
  EXPECT_EQ(refusal([&] {
              layer_norm_backward(machine.stream(), x, x, row, statistic, statistic, false, x, half_row, row);
            }),
            "layer_norm_backward: `weight_gradient` has dtype fp16, wanted fp32");
}

}  // namespace
}  // namespace tranche::kernels
