#pragma once
#include "tranche/kernels/copy_columns.h"

namespace tranche::kernels::cuda {

/// Like kernels/copy_columns.h, with checked arguments; one copy by the runtime.
decltype(kernels::copy_columns) copy_columns;

}  // namespace tranche::kernels::cuda
