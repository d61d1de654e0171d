#pragma once
#include "tranche/kernels/elementwise.h"

namespace tranche::kernels::cuda {

/// As in kernels/elementwise.h, arguments checked. One launch each; copy is the runtime's.
/// bias_gradient takes two for as many rows as the workspace holds sums of, dropout one for each 256 samples.
void cast(Stream& stream, const ConstTensorView& from, const TensorView& to);
void copy(Stream& stream, const ConstTensorView& from, const TensorView& to);
void fill_zero(Stream& stream, const TensorView& out);
void fill_constant(Stream& stream, const TensorView& out, float value);
void fill_normal(Stream& stream, const TensorView& out, const RandomKey& key, std::int64_t first_element,
                 float mean, float standard_deviation);
void fill_uniform(Stream& stream, const TensorView& out, const RandomKey& key, std::int64_t first_element,
                  float low, float high);
void add(Stream& stream, const ConstTensorView& a, const ConstTensorView& b, const TensorView& out);
void accumulate(Stream& stream, const ConstTensorView& x, const TensorView& accumulator);
void add_bias(Stream& stream, const TensorView& x, const ConstTensorView& bias);
void bias_gradient(Stream& stream, const ConstTensorView& gradient, const TensorView& bias_gradient,
                   const Workspace& workspace);
void gelu_forward(Stream& stream, const ConstTensorView& x, const TensorView& y);
void gelu_backward(Stream& stream, const ConstTensorView& x, const ConstTensorView& dy, const TensorView& dx);
void dropout(Stream& stream, const DropoutOptions& options, const ConstTensorView& x, const TensorView& y);

}  // namespace tranche::kernels::cuda
