#include "tranche/kernels/squared_error.h"

#include "kernel_testing.h"
#include "kernels/reference/squared_error.h"

namespace tranche::kernels::testing {
namespace {

constexpr auto fp32 = DataType::float32;

TEST(SquaredError, IsTheMeanOverColumnsSummedOverRows) {
  Machine machine;
  HostTensor y(fp32, {2, 3}, std::vector<double>{1, 2, 3, -1, 0, 4});
  HostTensor target(fp32, {2, 3}, std::vector<double>{0, 2, 5, -1, 2, 1});
  HostTensor loss(DataType::float64, {}, std::vector<double>{10});
  HostTensor rows(DataType::int64, {}, std::vector<double>{5});
  squared_error(machine.stream(), y.view(), target.view(), loss.view(), rows.view());
  EXPECT_DOUBLE_EQ(loss.values()[0], 10 + (1.0 + 0 + 4) / 3 + (0 + 4.0 + 9) / 3);
  EXPECT_EQ(rows.values()[0], 7);
  squared_error_gradient(machine.stream(), y.view(), target.view(), 1.5f, y.view());
  EXPECT_EQ(y.values(), (std::vector<double>{1, 0, -2, 0, -2, 3}));
}

/// The sum is fp64 like the reference's, in another order; the gradient has three fp32 roundings.
TEST(SquaredError, FollowsTheReference) {
  Random random(1);
  Machine machine;
  for (const auto& [rows, columns] : {std::pair{0, 3}, {1, 1}, {1, 131}, {257, 1}, {300, 7}, {513, 5}}) {
    HostTensor y = random.tensor(fp32, {rows, columns});
    HostTensor target = random.tensor(fp32, {rows, columns});
    HostTensor d_y(fp32, {rows, columns});
    HostTensor loss(DataType::float64, {}, std::vector<double>{0});
    HostTensor count(DataType::int64, {}, std::vector<double>{0});
    squared_error(machine.stream(), y.view(), target.view(), loss.view(), count.view());
    squared_error_gradient(machine.stream(), y.view(), target.view(), 0.3f, d_y.view());
    const double wanted = reference::squared_error(columns, y.values(), target.values());
    EXPECT_NEAR(loss.values()[0], wanted, 1e-12 * (1 + wanted))
        << rows << " x " << columns << "; " << repeat_line();
    EXPECT_EQ(count.values()[0], rows);
    std::vector<double> gradient(y.values().size());
    reference::squared_error_gradient(columns, y.values(), target.values(), static_cast<double>(0.3f),
                                      gradient);
    expect_close(d_y.values(), gradient, std::ldexp(3.0, -24), std::ldexp(1.0, -24), "d_y");
    EXPECT_TRUE(d_y.guard_intact());
  }
}

TEST(SquaredError, CountsTheSameOnMeta) {
  Machine meta(1, minimum_workspace_bytes, DeviceKind::meta);
  const TensorView y{nullptr, fp32, {4, 5}};
  const TensorView loss{nullptr, DataType::float64, {}}, rows{nullptr, DataType::int64, {}};
  squared_error(meta.stream(), y, y, loss, rows);
  squared_error_gradient(meta.stream(), y, y, 1, y);
  EXPECT_EQ(meta.stream().work().kernels, 2);
  EXPECT_EQ(meta.stream().work().floating_point_operations, 60 + 40);
  EXPECT_EQ(meta.stream().work().bytes_read, 160 + 160);
  EXPECT_EQ(meta.stream().work().bytes_written, 16 + 80);
}

TEST(SquaredError, RefusesByName) {
  Machine machine(1, minimum_workspace_bytes, DeviceKind::meta);
  Stream& stream = machine.stream();
  const TensorView y{nullptr, fp32, {2, 3}}, turned{nullptr, fp32, {3, 2}}, flat{nullptr, fp32, {6}};
  const TensorView half{nullptr, DataType::float16, {2, 3}};
  const TensorView loss{nullptr, DataType::float64, {}}, rows{nullptr, DataType::int64, {}};
  EXPECT_EQ(refusal([&] { squared_error(stream, half, y, loss, rows); }),
            "squared_error: `y` has dtype fp16, wanted fp32");
  EXPECT_EQ(refusal([&] { squared_error(stream, y, half, loss, rows); }),
            "squared_error: `target` has dtype fp16, wanted fp32");
  EXPECT_EQ(refusal([&] { squared_error(stream, flat, flat, loss, rows); }),
            "squared_error: `target` has shape [6], wanted 2 dimensions");
  EXPECT_EQ(refusal([&] { squared_error(stream, turned, y, loss, rows); }),
            "squared_error: `y` has shape [3, 2], wanted [2, 3]");
  EXPECT_EQ(refusal([&] { squared_error(stream, y, y, rows, rows); }),
            "squared_error: `loss_sum` has dtype int64, wanted fp64");
  EXPECT_EQ(refusal([&] { squared_error(stream, y, y, loss, loss); }),
            "squared_error: `row_count` has dtype fp64, wanted int64");
  EXPECT_EQ(refusal([&] { squared_error_gradient(stream, y, y, 1, turned); }),
            "squared_error_gradient: `d_y` has shape [3, 2], wanted [2, 3]");
}

}  // namespace
}  // namespace tranche::kernels::testing
