#pragma once
#include <cstdint>
#include <span>

#include "tranche/core/tensor_view.h"
#include "tranche/kernels/newton_schulz.h"

namespace tranche::kernels::cpu {

/// x = block / max(factor * |block|, least).
void normalized_block(int threads, const ConstTensorView& matrix, const MatrixBlock& block, double factor,
                      double least, float* x);
/// block = scale * x.
void store_block(int threads, const float* x, float scale, const TensorView& matrix,
                 const MatrixBlock& block);
/// out = x_factor * x + y_factor * y, all fp32; `out` may be x or y.
void scaled_sum(int threads, float x_factor, const TensorView& x, float y_factor, const TensorView& y,
                const TensorView& out);
/// Blocks whose smaller extent is at most this are iterated in fp64.
inline constexpr std::int64_t newton_schulz_few = 4;
/// Runs all of newton_schulz() for such a block, on one thread, in fp64. `x` holds as many elements as the
/// block.
void few_singular_values(std::span<const NewtonSchulzStep> steps, double factor, double least, double scale,
                         const TensorView& matrix, const MatrixBlock& block, double* x);

}  // namespace tranche::kernels::cpu
