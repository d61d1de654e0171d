#pragma once
/// Casts, fills, copies, sums, GELU, biases, dropout. Floating dtypes are fp32, bf16, fp16 unless stated;
/// arithmetic is fp32. Views of one call have equal element counts unless stated, and do not overlap unless
/// they are the same view ("in place is allowed"). matmul.h says how calls run and how long operands stay
/// valid.

#include <cstdint>
#include <span>

#include "tranche/core/random.h"
#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"
#include "tranche/kernels/workspace.h"

namespace tranche::kernels {

/// Converts between floating dtypes (round to nearest even).
void cast(Stream& stream, const ConstTensorView& from, const TensorView& to);
/// Copies bytes; dtypes and element counts are equal.
void copy(Stream& stream, const ConstTensorView& from, const TensorView& to);
/// Sets every byte to zero.
void fill_zero(Stream& stream, const TensorView& out);
/// out = value in every element.
void fill_constant(Stream& stream, const TensorView& out, float value);
/// out[i] = mean + standard_deviation * random_normal(key, first_element + i); out is fp32.
void fill_normal(Stream& stream, const TensorView& out, const RandomKey& key, std::int64_t first_element,
                 float mean, float standard_deviation);
/// out[i] = low + (high - low) * random_uniform(key, first_element + i); out is fp32.
void fill_uniform(Stream& stream, const TensorView& out, const RandomKey& key, std::int64_t first_element,
                  float low, float high);
/// out = a + b; in place is allowed. Dtypes may differ.
void add(Stream& stream, const ConstTensorView& a, const ConstTensorView& b, const TensorView& out);
/// accumulator += x; accumulator fp32 or 16-bit, x any floating dtype; summed in fp32, rounded once.
void accumulate(Stream& stream, const ConstTensorView& x, const TensorView& accumulator);
/// x *= factor, rounded once; in place.
void scale(Stream& stream, float factor, const TensorView& x);
/// x[r, :] += bias for every row r of x[rows, columns]; in place.
void add_bias(Stream& stream, const TensorView& x, const ConstTensorView& bias);
/// bias_gradient[columns] (fp32) += sum over rows of gradient[rows, columns], rows in fixed blocks of 64
/// summed in order, then the blocks, so the result does not depend on the number of threads. On cuda the
/// blocks' sums pass through the workspace, which holds at least 8 * columns bytes (InvalidArgument
/// otherwise) and serves more blocks at a time if it holds more; the CPU needs none.
void bias_gradient(Stream& stream, const ConstTensorView& gradient, const TensorView& bias_gradient,
                   const Workspace& workspace = {});

/// y = gelu(x), the tanh form (Hendrycks and Gimpel, 2016, section 2, as GPT-2 uses it), within 3 units in
/// the last place of fp32 for x >= -1 and within a relative 2e-5 below that. -infinity gives NaN.
void gelu_forward(Stream& stream, const ConstTensorView& x, const TensorView& y);
/// dx = dy * gelu'(x); in place on dy is allowed.
void gelu_backward(Stream& stream, const ConstTensorView& x, const ConstTensorView& dy, const TensorView& dx);
/// y = gelu(x) and dx = dy * gelu'(x), the bits of the two above: for a backward that recomputes y instead of
/// saving it. The CPU takes one pass with one exponential per element; cuda makes the two launches. dx in
/// place on dy is allowed.
void gelu_forward_backward(Stream& stream, const ConstTensorView& x, const ConstTensorView& dy,
                           const TensorView& y, const TensorView& dx);

/// The source of a dropout mask: element e of global sample s at `site` in `step` is dropped by a draw keyed
/// by (seed, step, site, s, e), so masks are the same for every number of ranks and under recomputation.
struct DropoutOptions {
  float probability = 0;  ///< in [0, 1); kept elements are scaled by 1 / (1 - probability)
  std::uint64_t seed = 0;
  std::uint64_t step = 0;
  std::uint32_t site = 0;
  std::span<const std::int64_t> samples;  ///< global sample index of each row block; host memory
  /// For a part of the samples (a rank's rows of a micro-batch): x[0] is element first_element of all the
  /// samples' elements, sample_elements each, one sample after the other. The part may begin and end inside a
  /// sample. Attention does not support parts.
  std::int64_t first_element = 0;
  std::int64_t sample_elements = 0;  ///< 0: x holds all elements of the samples
  /// For the same run of every sample (a rank's tokens of each sequence): the part of a sample in x begins
  /// with its element sample_offset.
  std::int64_t sample_offset = 0;
  /// For a part of the columns (a rank's part of a layer's inputs): x is [rows, columns], and its columns are
  /// column_blocks equal runs. Run k is at first_column of the k-th of as many equal blocks of a row of
  /// row_elements. Rows are whole samples: first_element and sample_elements must be 0.
  std::int64_t row_elements = 0;  ///< 0: x holds all columns
  std::int64_t first_column = 0;
  std::int64_t column_blocks = 1;
};
/// y[b, :] = dropout(x[b, :]) where x has samples.size() * elements_per_sample elements, or the part of them
/// that the options name, with the masks of the whole; elements of y after the last sample become 0. In place
/// is allowed. Backward is the same call on the gradient.
void dropout(Stream& stream, const DropoutOptions& options, const ConstTensorView& x, const TensorView& y);

}  // namespace tranche::kernels
