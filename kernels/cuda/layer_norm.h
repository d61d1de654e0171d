#pragma once
#include <cstdint>

#include "tranche/kernels/layer_norm.h"
#include "tranche/kernels/workspace.h"

namespace tranche::kernels::cuda {

/// As in kernels/layer_norm.h, arguments checked. Forward is one launch, backward two.
decltype(kernels::layer_norm_forward) layer_norm_forward;
decltype(kernels::residual_layer_norm_forward) residual_layer_norm_forward;
decltype(kernels::layer_norm_backward) layer_norm_backward;

}  // namespace tranche::kernels::cuda
