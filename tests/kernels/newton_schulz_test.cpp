#include "tranche/kernels/newton_schulz.h"

#include <algorithm>
#include <tuple>

#include "kernel_testing.h"
#include "newton_schulz_error.h"

namespace tranche::kernels::testing {
namespace {

constexpr auto fp32 = DataType::float32;
constexpr NewtonSchulzStep keller[] = {keller_step, keller_step, keller_step, keller_step, keller_step};

NewtonSchulzOptions polar_express() {
  NewtonSchulzOptions options;
  options.steps = polar_express_steps;
  options.norm_factor = 1.02;
  return options;
}
NewtonSchulzOptions by_keller() {
  NewtonSchulzOptions options;
  options.steps = keller;
  return options;
}

void orthogonalize(Stream& stream, const NewtonSchulzOptions& options, HostTensor& matrix,
                   const MatrixBlock& block) {
  const std::int64_t bytes = newton_schulz_scratch(block.rows, block.columns);
  HostTensor scratch(DataType::int64, {bytes / 8});
  newton_schulz(stream, options, matrix.view(), block, {scratch.view().data, bytes});
  EXPECT_TRUE(scratch.guard_intact());
  EXPECT_TRUE(matrix.guard_intact());
}

TEST(NewtonSchulz, FollowsTheReferenceInFp64) {
  Random random(1);
  Machine machine;
  for (const auto& [rows, columns] : {std::pair{1, 1},
                                      {1, 7},
                                      {9, 1},
                                      {5, 3},
                                      {3, 5},
                                      {2, 3},
                                      {4, 4},
                                      {5, 6},
                                      {7, 5},
                                      {64, 64},
                                      {33, 77},
                                      {77, 33},
                                      {48, 192},
                                      {192, 48}}) {
    for (const NewtonSchulzOptions& options : {polar_express(), by_keller()}) {
      for (const auto& [dtype, bound] : {std::pair(fp32, 1e-5), std::pair(DataType::bfloat16, 2e-2)}) {
        const double error =
            newton_schulz_error(random, dtype, rows, columns, options, [&](HostTensor matrix) {
              orthogonalize(machine.stream(), options, matrix, {0, 0, rows, columns});
              return matrix.values();
            });
        EXPECT_LE(error, bound) << rows << " x " << columns << " " << name_of(dtype) << "; " << repeat_line();
      }
    }
  }
}

/// Applies I - 2 v v^T / v^T v to the rows or columns of a matrix [rows, columns].
void reflect(std::vector<double>& matrix, std::size_t rows, std::size_t columns, bool from_left) {
  const std::size_t extent = from_left ? rows : columns, others = from_left ? columns : rows;
  const auto at = [&](std::size_t i, std::size_t other) -> double& {
    return from_left ? matrix[i * columns + other] : matrix[other * columns + i];
  };
  double squares = 0;
  for (std::size_t i = 0; i < extent; ++i) squares += static_cast<double>((i + 1) * (i + 1));
  for (std::size_t other = 0; other < others; ++other) {
    double product = 0;
    for (std::size_t i = 0; i < extent; ++i) product += static_cast<double>(i + 1) * at(i, other);
    for (std::size_t i = 0; i < extent; ++i)
      at(i, other) -= 2 * static_cast<double>(i + 1) * product / squares;
  }
}

TEST(NewtonSchulz, BringsSingularValuesFromAHundredthOnNearOne) {
  constexpr std::size_t rows = 6, columns = 9;
  Machine machine;
  for (const auto& [options, least, most] :
       {std::tuple(by_keller(), 0.682, 1.134), std::tuple(polar_express(), 0.859, 1.141)}) {
    for (double value = 0.01; value < 0.999; value *= 1.07) {
      // The norm is 1, so the iterations begin with these values.
      const double values[] = {value, std::sqrt(1 - value * value)};
      std::vector<double> matrix(rows * columns);
      for (std::size_t i = 0; i < 2; ++i) matrix[i * columns + i] = values[i];
      reflect(matrix, rows, columns, true);
      reflect(matrix, rows, columns, false);
      HostTensor tensor(fp32, {rows, columns}, matrix);
      orthogonalize(machine.stream(), options, tensor, {0, 0, rows, columns});
      std::vector<double> result = tensor.values();
      reflect(result, rows, columns, true);
      reflect(result, rows, columns, false);
      for (std::size_t i = 0; i < 2; ++i) {
        EXPECT_GE(result[i * columns + i], least - 0.03) << values[i];
        EXPECT_LE(result[i * columns + i], most + 0.03) << values[i];
      }
      EXPECT_NEAR(result[1], 0, 1e-4) << "the singular vectors stay";
    }
  }
}

TEST(NewtonSchulz, TakesBlocksByThemselvesAndScalesThem) {
  Random random(2);
  Machine machine;
  for (const bool side_by_side : {true, false}) {
    const Shape shape = side_by_side ? Shape{20, 36} : Shape{36, 20};
    HostTensor fused = random.tensor(DataType::bfloat16, shape);
    const std::vector<double> before = fused.values();
    const MatrixBlock middle = side_by_side ? MatrixBlock{0, 12, 20, 12} : MatrixBlock{12, 0, 12, 20};
    std::vector<double> alone;
    for (std::int64_t row = 0; row < middle.rows; ++row) {
      for (std::int64_t column = 0; column < middle.columns; ++column) {
        alone.push_back(
            before[static_cast<std::size_t>((middle.row + row) * shape[1] + middle.column + column)]);
      }
    }
    HostTensor single(DataType::bfloat16, {middle.rows, middle.columns}, alone);
    NewtonSchulzOptions options = polar_express();
    options.scale = 0.25;
    orthogonalize(machine.stream(), options, fused, middle);
    orthogonalize(machine.stream(), options, single, {0, 0, middle.rows, middle.columns});
    const std::vector<double> after = fused.values(), wanted = single.values();
    for (std::int64_t row = 0; row < shape[0]; ++row) {
      for (std::int64_t column = 0; column < shape[1]; ++column) {
        const std::int64_t in_row = row - middle.row, in_column = column - middle.column;
        const bool inside =
            in_row >= 0 && in_row < middle.rows && in_column >= 0 && in_column < middle.columns;
        const auto at = static_cast<std::size_t>(row * shape[1] + column);
        EXPECT_EQ(after[at], inside ? wanted[static_cast<std::size_t>(in_row * middle.columns + in_column)]
                                    : before[at]);
      }
    }
    options.scale = 1;
    HostTensor unscaled(DataType::bfloat16, {middle.rows, middle.columns}, alone);
    orthogonalize(machine.stream(), options, unscaled, {0, 0, middle.rows, middle.columns});
    const std::vector<double> four_times = unscaled.values();
    for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_EQ(4 * wanted[i], four_times[i]);
  }
}

TEST(NewtonSchulz, GivesZeroForZeroAndTheSameBitsForEveryNumberOfThreads) {
  Random random(3);
  HostTensor zero(fp32, {3, 4}, std::vector<double>(12));
  Machine machine, four(4);
  orthogonalize(machine.stream(), polar_express(), zero, {0, 0, 3, 4});
  EXPECT_EQ(zero.values(), std::vector<double>(12));
  HostTensor one = random.tensor(DataType::bfloat16, {300, 257});
  HostTensor other(DataType::bfloat16, {300, 257}, one.values());
  orthogonalize(machine.stream(), polar_express(), one, {0, 0, 300, 257});
  orthogonalize(four.stream(), polar_express(), other, {0, 0, 300, 257});
  EXPECT_EQ(one.values(), other.values());
}

TEST(NewtonSchulz, CountsTheSameOnMetaAndSaysWhatItTakes) {
  Machine meta(1, minimum_workspace_bytes, DeviceKind::meta), machine;
  for (const std::int64_t rows : {4, 5}) {
    HostTensor matrix(fp32, {rows, 6}, std::vector<double>(static_cast<std::size_t>(6 * rows), 1.0));
    orthogonalize(machine.stream(), polar_express(), matrix, {0, 0, rows, 6});
    const TensorView nowhere{nullptr, fp32, {rows, 6}};
    newton_schulz(meta.stream(), polar_express(), nowhere, {0, 0, rows, 6}, {nullptr, 1 << 20});
  }
  EXPECT_EQ(meta.stream().work().floating_point_operations,
            machine.stream().work().floating_point_operations);
  EXPECT_EQ(meta.stream().work().bytes_read, machine.stream().work().bytes_read);
  EXPECT_EQ(meta.stream().work().bytes_written, machine.stream().work().bytes_written);
  EXPECT_EQ(meta.stream().work().kernels, 1 + 2 + 5 * 5);
  EXPECT_EQ(newton_schulz_operations(4, 6, 5), 5 * (4 * 4 * 4 * 6 + 2 * 4 * 4 * 4));
  EXPECT_EQ(newton_schulz_operations(6, 4, 5), newton_schulz_operations(4, 6, 5));
  EXPECT_EQ(newton_schulz_scratch(4, 6), 128 + 128 + 64 + 64);
}

TEST(NewtonSchulz, RefusesByName) {
  Machine machine(1, minimum_workspace_bytes, DeviceKind::meta);
  const TensorView matrix{nullptr, fp32, {4, 6}}, vector{nullptr, fp32, {24}};
  const TensorView whole_numbers{nullptr, DataType::int32, {4, 6}};
  const Workspace scratch{nullptr, 1 << 20};
  const auto refused = [&](const TensorView& of, const MatrixBlock& block, const Workspace& memory) {
    return refusal([&] { newton_schulz(machine.stream(), polar_express(), of, block, memory); });
  };
  EXPECT_EQ(refused(vector, {0, 0, 1, 1}, scratch),
            "newton_schulz: `matrix` has shape [24], wanted 2 dimensions");
  EXPECT_EQ(refused(whole_numbers, {0, 0, 1, 1}, scratch),
            "newton_schulz: `matrix` has dtype int32, wanted fp32, bf16 or fp16");
  EXPECT_EQ(refused(matrix, {1, 0, 4, 6}, scratch),
            "newton_schulz: the block does not lie within `matrix`, [4, 6]");
  EXPECT_EQ(refused(matrix, {0, 0, 4, 6}, {nullptr, 8}),
            "newton_schulz: the scratch has 8 bytes, wanted at least 384");
  NewtonSchulzOptions many;
  const std::vector<NewtonSchulzStep> steps(101, keller_step);
  many.steps = steps;
  EXPECT_EQ(refusal([&] {
              newton_schulz(machine.stream(), many, matrix, {0, 0, 4, 6}, scratch);
            }),
            "newton_schulz: there are 101 steps, wanted at most 100");
}

}  // namespace
}  // namespace tranche::kernels::testing
