// Compares Newton-Schulz iterations on a GPU or its emulation with the fp64 reference.

#include <algorithm>
#include <vector>

#include "kernels/reference/newton_schulz.h"
#include "tests/kernels/gpu_testing.h"
#include "tests/kernels/newton_schulz_error.h"
#include "tranche/kernels/newton_schulz.h"

namespace tranche::kernels {
namespace {

using namespace testing;

constexpr auto fp32 = DataType::float32;
constexpr NewtonSchulzStep keller[] = {keller_step, keller_step, keller_step, keller_step, keller_step};

class NewtonSchulzGpu : public GpuTest {
 protected:
  /// A matrix with this shape whose block was orthogonalized; its other elements are unchanged.
  std::vector<double> orthogonal(const HostTensor& matrix, DataType dtype, const Shape& shape,
                                 const NewtonSchulzOptions& options, const MatrixBlock& block) {
    const Tensor on_matrix = on_gpu(matrix, dtype, shape);
    const Shape words{newton_schulz_scratch(block.rows, block.columns) / 4};
    const Tensor scratch = poisoned(fp32, words);
    newton_schulz(stream(), options, on_matrix.view(), block,
                  {scratch.view().data, words.elements() * size_of(fp32)});
    scratch.values();  // also checks its guard
    return on_matrix.values();
  }
};

TEST_F(NewtonSchulzGpu, FollowsTheReferenceInFp64) {
  Random random(1);
  for (const auto& [rows, columns] :
       {std::pair{1, 1}, {1, 7}, {9, 1}, {2, 300}, {300, 4}, {5, 3}, {5, 6}, {33, 77}, {77, 33}, {64, 64}}) {
    for (const bool of_polar_express : {false, true}) {
      for (const auto& [dtype, bound] :
           {std::pair(fp32, 1e-5), std::pair(DataType::bfloat16, 2e-2), std::pair(DataType::float16, 2e-3)}) {
        NewtonSchulzOptions options;
        options.steps = keller;
        if (of_polar_express) {
          options.steps = polar_express_steps;
          options.norm_factor = 1.02;
        }
        const double error =
            newton_schulz_error(random, dtype, rows, columns, options, [&](const HostTensor& matrix) {
              return orthogonal(matrix, dtype, {rows, columns}, options, {0, 0, rows, columns});
            });
        EXPECT_LE(error, bound) << rows << " x " << columns << " " << name_of(dtype) << "; " << repeat_line();
      }
    }
  }
}

TEST_F(NewtonSchulzGpu, ABlockIsScaledAndTheRestOfItsMatrixStays) {
  Random random(2);
  constexpr std::int64_t rows = 20, columns = 31;
  for (const MatrixBlock& block : {MatrixBlock{3, 5, 7, 11}, MatrixBlock{2, 0, 18, 9}, {1, 28, 19, 3}}) {
    NewtonSchulzOptions options;
    options.steps = keller;
    options.scale = 0.25;
    const HostTensor matrix = random.tensor(fp32, {rows, columns});
    const std::vector<double> before = matrix.values();
    std::vector<double> own;
    for (std::int64_t i = 0; i < block.rows; ++i) {
      for (std::int64_t j = 0; j < block.columns; ++j) {
        own.push_back(before[static_cast<std::size_t>((block.row + i) * columns + block.column + j)]);
      }
    }
    std::vector<double> wanted =
        reference::newton_schulz(options.steps, options.norm_factor, block.rows, block.columns, own);
    for (double& value : wanted) value *= options.scale;
    const std::vector<double> after = orthogonal(matrix, fp32, {rows, columns}, options, block);
    std::vector<double> got;
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) {
        const auto at = static_cast<std::size_t>(i * columns + j);
        const bool inside = i >= block.row && i < block.row + block.rows && j >= block.column &&
                            j < block.column + block.columns;
        if (inside) {
          got.push_back(after[at]);
        } else {
          ASSERT_EQ(after[at], before[at]) << i << ", " << j;
        }
      }
    }
    EXPECT_LE(relative_error(got, wanted), 1e-5) << block.rows << " x " << block.columns;
  }
}

TEST_F(NewtonSchulzGpu, ZerosStayZeros) {
  NewtonSchulzOptions options;
  options.steps = keller;
  for (const auto& [rows, columns] : {std::pair{3, 9}, {16, 9}}) {
    const HostTensor matrix(fp32, {rows, columns},
                            std::vector<double>(static_cast<std::size_t>(rows * columns)));
    for (const double value : orthogonal(matrix, fp32, {rows, columns}, options, {0, 0, rows, columns})) {
      ASSERT_EQ(value, 0.0);
    }
  }
}

}  // namespace
}  // namespace tranche::kernels
