#pragma once
/// Rotary positions (RoFormer, Su et al., 2021), as transformers computes them for the Llama family.

#include <cstdint>
#include <span>
#include <vector>

#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"
#include "tranche/kernels/rope_scaling.h"

namespace tranche::kernels {

/// transformers' inv_freq: theta^(-2i / rotary_width) for i < rotary_width / 2, scaled by `scaling`,
/// operation by operation in fp32; the power is rounded from fp64, and may differ from PyTorch's in the last
/// bit. Throws InvalidArgument for a rotary_width that is odd or below 2, a theta or factor that is not above
/// 0, and llama3 factors that are not in order.
std::vector<float> rope_frequencies(std::int64_t rotary_width, double theta, const RopeScaling& scaling);

/// table[row] = cos(angle), then sin(angle), of angle = position * frequencies[i] in fp32. table is fp32
/// [rows, 2 * frequencies]; positions is int32 [rows], or empty for first_position + row % time.
/// `frequencies` is host memory and copied.
void rope_table(Stream& stream, std::span<const float> frequencies, const ConstTensorView& positions,
                std::int64_t time, const TensorView& table, std::int64_t first_position = 0);

/// Rotates the pairs (i, i + rotary_width / 2) of each head of x[rows, heads * head_dim] in place, by the
/// row's angles in `table` [rows, rotary_width]; a head's elements from rotary_width on are unchanged. It is
/// computed in fp32 and rounded once. `inverse` rotates back, which is the backward: it turns the gradient of
/// the result into that of x.
void rope(Stream& stream, bool inverse, const ConstTensorView& table, std::int64_t heads,
          std::int64_t head_dim, const TensorView& x);

}  // namespace tranche::kernels
