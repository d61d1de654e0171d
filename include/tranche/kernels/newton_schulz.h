#pragma once
/// The orthogonal factor of a matrix by Newton-Schulz iterations, for update rules on whole matrices (Muon).
/// matmul.h describes how calls run and how long operands stay valid.

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"
#include "tranche/kernels/workspace.h"

namespace tranche::kernels {

/// a, b, c of one iteration: X = a X + (b A + c A A) X, where A = X X^T.
using NewtonSchulzStep = std::array<double, 3>;
/// Jordan's (2024), the same in every iteration.
inline constexpr NewtonSchulzStep keller_step = {3.4445, -4.7750, 2.0315};
/// The Polar Express (Amsel et al., 2025) for singular values from 1e-3 on; after the fifth step the last
/// repeats.
inline constexpr NewtonSchulzStep polar_express_steps[] = {
    {8.156554524902461, -22.48329292557795, 15.878769915207462},
    {4.042929935166739, -2.808917465908714, 0.5000178451051316},
    {3.8916678022926607, -2.772484153217685, 0.5060648178503393},
    {3.285753657755655, -2.3681294933425376, 0.46449024233003106},
    {2.3465413258596377, -1.7097828382687081, 0.42323551169305323}};

/// Rows [row, row + rows) and columns [column, column + columns) of a matrix.
struct MatrixBlock {
  std::int64_t row = 0, column = 0, rows = 0, columns = 0;
};

struct NewtonSchulzOptions {
  std::span<const NewtonSchulzStep> steps;
  double norm_factor = 1;    ///< the block is first divided by this times its Frobenius norm
  double least_norm = 1e-7;  ///< the least value of that divisor
  double scale = 1;          ///< factor of the result
};

/// The block of `matrix` (two dimensions, any floating dtype) becomes scale * p(block / (norm_factor *
/// |block|)), where p applies the steps. GEMMs and sums are in fp32 from fp32 values, rounded once at the
/// end, or in fp64 where the smaller extent is at most 4. At most 100 steps. The norm is summed in fp64,
/// first within rows, then over rows in order. `scratch` has newton_schulz_scratch() bytes, and is aligned to
/// 64. The bits are the same for every number of threads. Throws InvalidArgument on shapes or a scratch that
/// is too small.
void newton_schulz(Stream& stream, const NewtonSchulzOptions& options, const TensorView& matrix,
                   const MatrixBlock& block, const Workspace& scratch);
std::int64_t newton_schulz_scratch(std::int64_t rows, std::int64_t columns);
/// The floating-point operations of its GEMMs.
double newton_schulz_operations(std::int64_t rows, std::int64_t columns, int steps);

}  // namespace tranche::kernels
