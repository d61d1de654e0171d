#pragma once
#include "tranche/kernels/squared_error.h"

namespace tranche::kernels::cuda {

/// Like kernels/squared_error.h, with checked arguments; one launch each.
decltype(kernels::squared_error) squared_error;
decltype(kernels::squared_error_gradient) squared_error_gradient;

}  // namespace tranche::kernels::cuda
