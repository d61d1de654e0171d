#pragma once
#include "tranche/kernels/layer_norm.h"
#include "tranche/kernels/rms_norm.h"

namespace tranche::kernels::cuda {

/// Like kernels/layer_norm.h and kernels/rms_norm.h, with checked arguments. Forward is one launch, backward
/// two.
decltype(kernels::layer_norm_forward) layer_norm_forward;
decltype(kernels::residual_layer_norm_forward) residual_layer_norm_forward;
decltype(kernels::layer_norm_backward) layer_norm_backward;
decltype(kernels::rms_norm_forward) rms_norm_forward;
decltype(kernels::residual_rms_norm_forward) residual_rms_norm_forward;
decltype(kernels::rms_norm_backward) rms_norm_backward;

}  // namespace tranche::kernels::cuda
