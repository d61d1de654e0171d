#pragma once
#include "tranche/kernels/elementwise.h"

namespace tranche::kernels::cpu {

/// As in kernels/elementwise.h, arguments checked, on the calling thread and `threads - 1` more.
void cast(int threads, const ConstTensorView& from, const TensorView& to);
void copy(int threads, const ConstTensorView& from, const TensorView& to);
void fill_zero(int threads, const TensorView& out);
void fill_constant(int threads, const TensorView& out, float value);
void fill_normal(int threads, const TensorView& out, const RandomKey& key, std::int64_t first_element,
                 float mean, float standard_deviation);
void fill_uniform(int threads, const TensorView& out, const RandomKey& key, std::int64_t first_element,
                  float low, float high);
void add(int threads, const ConstTensorView& a, const ConstTensorView& b, const TensorView& out);
void accumulate(int threads, const ConstTensorView& x, const TensorView& accumulator);
void add_bias(int threads, const TensorView& x, const ConstTensorView& bias);
void bias_gradient(int threads, const ConstTensorView& gradient, const TensorView& bias_gradient);
void gelu_forward(int threads, const ConstTensorView& x, const TensorView& y);
void gelu_backward(int threads, const ConstTensorView& x, const ConstTensorView& dy, const TensorView& dx);
void gelu_forward_backward(int threads, const ConstTensorView& x, const ConstTensorView& dy,
                           const TensorView& y, const TensorView& dx);

}  // namespace tranche::kernels::cpu
