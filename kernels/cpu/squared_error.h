#pragma once
#include "kernels/versions.h"
#include "tranche/kernels/squared_error.h"

namespace tranche::kernels::cpu {

/// Like kernels/squared_error.h with checked arguments, on the calling thread.
OnThread<decltype(kernels::squared_error)> squared_error;
OnThread<decltype(kernels::squared_error_gradient)> squared_error_gradient;

}  // namespace tranche::kernels::cpu
