#pragma once
#include <cstddef>
#include <span>

#include "tranche/kernels/newton_schulz.h"

namespace tranche::kernels::cuda {

// Like kernels/cpu/newton_schulz.h, on the stream. Sums are in different orders there, and so have different
// bits.

/// The limit exists because the steps are a kernel parameter.
inline constexpr std::size_t newton_schulz_most_steps = 100;

/// `row_sums` is memory for one fp64 number per row.
void normalized_block(Stream& stream, const ConstTensorView& matrix, const MatrixBlock& block, double factor,
                      double least, float* x, double* row_sums);
void store_block(Stream& stream, const float* x, float scale, const TensorView& matrix,
                 const MatrixBlock& block);
void scaled_sum(Stream& stream, float x_factor, const TensorView& x, float y_factor, const TensorView& y,
                const TensorView& out);
void few_singular_values(Stream& stream, std::span<const NewtonSchulzStep> steps, double factor, double least,
                         double scale, const TensorView& matrix, const MatrixBlock& block, double* x);

}  // namespace tranche::kernels::cuda
