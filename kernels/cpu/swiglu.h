#pragma once
#include "kernels/versions.h"
#include "tranche/kernels/swiglu.h"

namespace tranche::kernels::cpu {

/// Like kernels/swiglu.h with checked arguments, on the calling thread and `threads - 1` more.
OnThreads<decltype(kernels::swiglu_forward)> swiglu_forward;
OnThreads<decltype(kernels::swiglu_forward_backward)> swiglu_forward_backward;

}  // namespace tranche::kernels::cpu
