#pragma once
#include "kernels/versions.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::kernels::cpu {

/// Like kernels/elementwise.h with checked arguments, on the calling thread and `threads - 1` more.
OnThreads<decltype(kernels::cast)> cast;
OnThreads<decltype(kernels::copy)> copy;
OnThreads<decltype(kernels::fill_zero)> fill_zero;
OnThreads<decltype(kernels::fill_constant)> fill_constant;
OnThreads<decltype(kernels::fill_normal)> fill_normal;
OnThreads<decltype(kernels::fill_uniform)> fill_uniform;
OnThreads<decltype(kernels::add)> add;
OnThreads<decltype(kernels::accumulate)> accumulate;
OnThreads<decltype(kernels::scale)> scale;
OnThreads<decltype(kernels::add_bias)> add_bias;
void bias_gradient(int threads, const ConstTensorView& gradient, const TensorView& bias_gradient);
OnThreads<decltype(kernels::gelu_forward)> gelu_forward;
OnThreads<decltype(kernels::gelu_backward)> gelu_backward;
OnThreads<decltype(kernels::gelu_forward_backward)> gelu_forward_backward;

}  // namespace tranche::kernels::cpu
