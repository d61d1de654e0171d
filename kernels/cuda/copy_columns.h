#pragma once
#include "tranche/kernels/copy_columns.h"

namespace tranche::kernels::cuda {

/// Like kernels/copy_columns.h, with checked arguments. It is one copy by the CUDA runtime.
decltype(kernels::copy_columns) copy_columns;

}  // namespace tranche::kernels::cuda
