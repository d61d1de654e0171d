#pragma once
#include "tranche/kernels/elementwise.h"

namespace tranche::kernels::cuda {

/// Like kernels/elementwise.h, with checked arguments. One launch each; the runtime makes the copies.
/// bias_gradient takes two for as many rows as the workspace holds sums of, dropout one for each 256 samples.
decltype(kernels::cast) cast;
decltype(kernels::copy) copy;
decltype(kernels::fill_zero) fill_zero;
decltype(kernels::fill_constant) fill_constant;
decltype(kernels::fill_normal) fill_normal;
decltype(kernels::fill_uniform) fill_uniform;
decltype(kernels::add) add;
decltype(kernels::accumulate) accumulate;
decltype(kernels::scale) scale;
decltype(kernels::add_bias) add_bias;
decltype(kernels::bias_gradient) bias_gradient;
decltype(kernels::gelu_forward) gelu_forward;
decltype(kernels::gelu_backward) gelu_backward;
decltype(kernels::dropout) dropout;

}  // namespace tranche::kernels::cuda
