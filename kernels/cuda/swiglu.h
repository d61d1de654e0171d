#pragma once
#include "tranche/kernels/swiglu.h"

namespace tranche::kernels::cuda {

/// Like kernels/swiglu.h, with checked arguments. One launch each.
decltype(kernels::swiglu_forward) swiglu_forward;
decltype(kernels::swiglu_forward_backward) swiglu_forward_backward;

}  // namespace tranche::kernels::cuda
