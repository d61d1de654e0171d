#include "tranche/kernels/copy_columns.h"

#include "kernel_testing.h"

namespace tranche::kernels::testing {
namespace {

TEST(CopyColumns, GoToTheirPlaceAndNowhereElse) {
  Random random(3);
  Machine machine;
  for (const DataType dtype : {DataType::float32, DataType::bfloat16, DataType::int64}) {
    for (const std::int64_t rows : {0, 1, 5, 3000}) {
      for (const auto& [wide, from_column, width, to_column, columns] : {std::tuple{7, 2, 5, 1, 3},
                                                                         {4, 0, 4, 0, 4},
                                                                         {64, 31, 40, 8, 32},
                                                                         {3, 1, 9, 8, 1},
                                                                         {3, 3, 2, 2, 0}}) {
        HostTensor from(dtype, {rows, wide}), to(dtype, {rows, width});
        std::vector<double> values, expected;
        for (std::int64_t i = 0; i < rows * wide; ++i) values.push_back(static_cast<double>(i % 199));
        from = HostTensor(dtype, {rows, wide}, values);
        for (std::int64_t i = 0; i < rows * width; ++i) expected.push_back(-1);
        to = HostTensor(dtype, {rows, width}, expected);
        copy_columns(machine.stream(), from.view(), from_column, to.view(), to_column, columns);
        for (std::int64_t r = 0; r < rows; ++r) {
          for (std::int64_t c = 0; c < columns; ++c) {
            expected[static_cast<std::size_t>(r * width + to_column + c)] =
                values[static_cast<std::size_t>(r * wide + from_column + c)];
          }
        }
        EXPECT_EQ(to.values(), expected) << rows << " rows of " << name_of(dtype);
        EXPECT_TRUE(to.guard_intact());
      }
    }
  }
}

TEST(CopyColumns, CountTheSameOnMeta) {
  Machine meta(1, minimum_workspace_bytes, DeviceKind::meta);
  const TensorView from{nullptr, DataType::bfloat16, {4, 5}}, to{nullptr, DataType::bfloat16, {4, 9}};
  copy_columns(meta.stream(), from, 1, to, 6, 3);
  EXPECT_EQ(meta.stream().work().kernels, 1);
  EXPECT_EQ(meta.stream().work().bytes_read, 24);
  EXPECT_EQ(meta.stream().work().bytes_written, 24);
}

TEST(CopyColumns, RefuseByName) {
  Machine machine;
  const TensorView from{nullptr, DataType::float32, {4, 5}}, to{nullptr, DataType::float32, {4, 9}};
  const TensorView flat{nullptr, DataType::float32, {20}}, half{nullptr, DataType::float16, {4, 9}};
  Stream& stream = machine.stream();
  EXPECT_EQ(refusal([&] { copy_columns(stream, from, 3, to, 0, 3); }),
            "copy_columns: `from` has 5 columns, wanted columns 3 to 6");
  EXPECT_EQ(refusal([&] { copy_columns(stream, from, 0, to, -1, 2); }),
            "copy_columns: `to` has 9 columns, wanted columns -1 to 1");
  EXPECT_EQ(refusal([&] { copy_columns(stream, from, 0, half, 0, 2); }),
            "copy_columns: `to` has dtype fp16, wanted fp32");
  EXPECT_EQ(refusal([&] { copy_columns(stream, flat, 0, to, 0, 2); }),
            "copy_columns: `from` has shape [20], wanted 2 dimensions");
}

}  // namespace
}  // namespace tranche::kernels::testing
